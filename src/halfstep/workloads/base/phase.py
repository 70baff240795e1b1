"""A phase: a part of the model with a loss, a schedule and a verdict of its own, as the networks of a GAN have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from halfstep.errors import ConfigError

if TYPE_CHECKING:
    from halfstep.workloads.base.parts import Group
    from halfstep.workloads.base.workload import Forward, Loss


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    """One optimizer step of an iteration. Phases run in the order they are given, each with its own forward pass."""

    name: str
    parameters: tuple[str, ...] = ()
    """What it trains: names of modules or parameters of the model, `generator` names all below it; empty: all.
    Nothing else gets gradients while it runs."""
    loss: Loss
    forward: Forward | None = None
    """None: the workload's own. All that needs the model belongs here; `loss` gets the outputs."""
    counted: bool | None = None
    """Whether training metrics may take its outputs; None: where `forward` is the workload's own. The first such phase
    is counted, so that a sample counts once."""
    every: int = 1
    """Due in iterations `from_step`, `from_step + every`, ..."""
    from_step: int = 0
    optimizer: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the config's `optimizer` that differ."""
    schedule: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the config's `schedule` that differ; it follows the steps of this phase."""
    groups: tuple[Group, ...] = ()
    """Parameters with a learning rate or schedule of their own."""
    compiles: bool = True
    """False for a loss that takes gradients itself, such as a gradient penalty: the compiler cannot."""

    def __post_init__(self) -> None:
        if not self.name.isidentifier():
            raise ConfigError(
                f"{self.name!r} is not a name for a phase",
                why="reports and checkpoints name it",
                fix="letters, digits, _",
            )
        if self.every < 1 or self.from_step < 0:
            raise ConfigError(
                f"phase {self.name} cannot run every {self.every} iterations from {self.from_step} on",
                fix="every is at least 1, from_step at least 0",
            )

    def is_due(self, iteration: int) -> bool:
        return iteration >= self.from_step and (iteration - self.from_step) % self.every == 0

    @property
    def when(self) -> str:
        """`critic every 2 steps from 1000`, for headers."""
        every = f" every {self.every} steps" if self.every > 1 else ""
        return f"{self.name}{every}" + (f" from {'' if every else 'step '}{self.from_step}" if self.from_step else "")

    def num_due(self, iterations: int) -> int:
        """Of so many iterations, those in which it runs."""
        return max(0, -(-(iterations - self.from_step) // self.every))
