"""This process among those of a run: what it writes, what it makes alone, and what all of them decide."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from halfstep.config.schema import RunConfig
from halfstep.errors import CheckpointError
from halfstep.hardware.probe import probe
from halfstep.precision.plan import Plan
from halfstep.run.agreed_trials import Trials
from halfstep.run.folder import RunFolder
from halfstep.run.rehearse import rehearsal
from halfstep.run.world import Launch, device_of
from halfstep.step.world import World, agreed
from halfstep.tune.trials import Rehearse
from halfstep.workloads.workload import Workload

Made = TypeVar("Made")


@dataclass(frozen=True, slots=True)
class Place:
    """This process among those of the run."""

    launch: Launch | None
    world: World | None

    @property
    def writes(self) -> bool:
        """Whether files and screen are its own."""
        return self.world is None or self.world.is_first

    def of_first(self, make: Callable[[], Made]) -> Made:
        """Made by the process that writes, known to all."""
        return make() if self.world is None else self.world.from_first(make)

    def device_of(self, config: RunConfig) -> str:
        return device_of(config, self.launch)

    def to_go_on_with(self, out: Path | None) -> Path | None:
        """The run that was under way when torchrun started its processes again."""
        if self.launch is None or not self.launch.restarts:
            return None
        if out is None:
            raise agreed(
                CheckpointError(
                    "torchrun has started the processes again, and the run has no folder of a known name",
                    why="a folder named by the clock cannot be found again",
                    fix="name it with --out DIR",
                )
            )
        return self.of_first(lambda: out if RunFolder(out).checkpoints().all() else None)

    def plan_from(self, make: Callable[[Rehearse], Plan], config: RunConfig, workload: Workload) -> Plan:
        """One plan for all, each on its own device, by trials that each makes on its part of a batch."""
        if self.world is None:
            return make(rehearsal)
        device = probe(self.device_of(config)).device
        return Trials(self.world, self.on_trial(config), workload, device, rehearsal).planned(make)

    def on_trial(self, config: RunConfig) -> RunConfig:
        """The config as trials take it: a process computes its part of a batch, and none of them cuts it by itself."""
        if self.world is None:
            return config
        own = {"batch_size": self.world.rows(config.train.batch_size), "auto_batch": False}
        return config.model_copy(update={"train": config.train.model_copy(update=own)})
