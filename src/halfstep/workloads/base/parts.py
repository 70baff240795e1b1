"""Parts of what is trained that differ from the rest: frozen ones, and parameters with settings of their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from halfstep.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class FrozenPart:
    """A module that is used and not trained, and the file it came from; empty where it was made here."""

    module: nn.Module
    source: str = ""
    checksum: str = ""
    """Filled in by a run: of the weights as they were built."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Parameters with settings of their own; None leaves what the config says."""

    modules: tuple[str, ...]
    """Names of modules or parameters of the model; `encoder` names all below it. The first group that fits counts."""
    lr: float | None = None
    """The peak of its schedule, as it is: not scaled with the batch."""
    schedule: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the config's `schedule` that differ."""
    weight_decay: float | None = None


def frozen_parts(given: Mapping[str, Any]) -> dict[str, FrozenPart]:
    """Modules or FrozenParts as FrozenParts."""
    return {name: _frozen(name, part) for name, part in given.items()}


def _frozen(name: str, part: Any) -> FrozenPart:
    if not name.isidentifier():
        raise ConfigError(
            f"{name!r} is not a name for a frozen part",
            why="precision.modules and the run's folder name it",
            fix="letters, digits and _",
        )
    if not isinstance(part, nn.Module | FrozenPart):
        raise ConfigError(f"the frozen part {name!r} is a {type(part).__name__}", fix="give an nn.Module or FrozenPart")
    return part if isinstance(part, FrozenPart) else FrozenPart(module=part)


def refuse_held_twice(model: nn.Module, frozen: Mapping[str, FrozenPart]) -> None:
    """A frozen part that is part of the model too, by its name or by its weights."""
    trained = {id(parameter) for parameter in model.parameters()}
    for name, part in frozen.items():
        if name in dict(model.named_children()):
            raise ConfigError(
                f"{name!r} names a frozen part and a module of {type(model).__name__}",
                why="precision.modules could mean either",
                fix="give one of them another name",
            )
        if any(id(parameter) in trained for parameter in part.module.parameters()):
            raise ConfigError(
                f"{type(model).__name__} holds weights of the frozen part {name!r}",
                why="they would be trained, averaged and stored with it",
                fix="keep the part out of the model: let forward hold it",
            )
