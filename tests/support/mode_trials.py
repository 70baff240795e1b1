"""Trials whose times are scripted, on a clock that they move: what is decided from them is the code under test."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from halfstep.hardware.probe import probe
from halfstep.precision.plan import Plan
from halfstep_train.config.schema import RunConfig
from halfstep_train.run.assemble import build_workload, decide_plan
from halfstep_train.run.engine import RunRehearsal
from halfstep_train.tune.trials import CannotRun, Cost, DoesNotFit, TrialTime
from halfstep_train.workloads import from_dict
from halfstep_train.workloads.base.workload import Workload

USUAL = {
    "eager": 30.0, "eager NCHW": 50.0, "compile": 20.0, "graph": 15.0, "graph cudnn": 12.0, "graph cudnn tuned": 11.0,
}  # fmt: skip
"""Milliseconds of a step on a GPU where everything gains."""


@dataclass
class Machine:
    """What each candidate's step takes there (None: it does not fit), its first step, and why some do not run."""

    step_ms: dict[str, float | None]
    start_s: dict[str, float] = field(default_factory=dict)
    broken: dict[str, CannotRun] = field(default_factory=dict)
    trial_s: float = 1.0
    now_s: float = 0.0
    tried: list[str] = field(default_factory=list)

    def clock(self) -> float:
        return self.now_s


@dataclass(frozen=True)
class ScriptedRehearsal(RunRehearsal):
    """A rehearsal whose trials run on such a machine."""

    machine: Machine

    @contextlib.contextmanager
    def begin(self, plan: Plan, **changes: Any) -> Iterator[Any]:
        yield Scripted(self.machine, plan)


@dataclass
class Scripted:
    """In the place of a Trial."""

    machine: Machine
    plan: Plan

    def measure(self, mode: str, time: TrialTime, *, cudnn_benchmark: bool | None = None) -> Cost:
        label = mode if self.plan.channels_last else f"{mode} NCHW"
        label += " cudnn" if cudnn_benchmark or self.plan.cudnn_benchmark else ""
        label += " tuned" if self.plan.tunes_kernels else ""
        self.machine.tried.append(label)
        with time.count_start():
            self.machine.now_s += self.machine.start_s.get(label, 0.0)
        self.machine.now_s += self.machine.trial_s
        ms = self.machine.step_ms[label]
        if label in self.machine.broken:
            raise self.machine.broken[label]
        if ms is None:
            raise DoesNotFit("out of memory")
        return Cost(ms, 1)


def made(demo: Path, **values: object) -> tuple[RunConfig, Workload, Plan]:
    """A tiny U-Net on the CPU, before it is assembled."""
    small = {"data.dir": str(demo), "data.image_size": 16, "data.num_workers": 0, "data.val_fraction": 0.2,
             "model.base_channels": 2, "model.depth": 1, "train.batch_size": 2, "device": "cpu"}  # fmt: skip
    config = from_dict("unet", {**small, **{k.replace("__", "."): v for k, v in values.items()}}).config
    workload = build_workload(config)
    return config, workload, decide_plan(config, workload, probe("cpu"))
