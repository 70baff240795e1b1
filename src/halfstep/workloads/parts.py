"""Parts of what is trained that differ from the rest: frozen ones, and parameters with settings of their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn


@dataclass(frozen=True, kw_only=True, slots=True)
class FrozenPart:
    """A module that is used and not trained, and the file it came from; empty where it was made here."""

    module: nn.Module
    source: str = ""


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
