"""Time a suggestion on the device: train its model for a few seconds on synthetic images.

The batch doubles from two samples up to the suggested size while time is left: a slow device spends the seconds on a
small batch, a fast one on the full batch. Steps are those of a run, but eager.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from halfstep.hardware.clock import wait_for
from halfstep.hardware.device_facts import Hardware
from halfstep_train.config.schema import RunConfig
from halfstep_train.run.assemble import assemble, decide_plan
from halfstep_train.run.engine import make_engine
from halfstep_train.run.memory.out_of_memory import OutOfMemory
from halfstep_train.run.memory.traceable_step import NoSamples
from halfstep_train.workloads import KINDS
from halfstep_train.workloads.base.workload import Batch

TRIAL_S = 3.0
"""Seconds per trial: no step starts that would end later."""
ENOUGH = 4
"""Steps at the largest size; the first is slower."""
SMALLEST = 2
"""BatchNorm needs more than one value per channel."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialResult:
    """The result of one trial."""

    samples_per_s: float
    batch_size: int


class Trials:
    """Trials on one device, cached: suggestions often differ only in how long they train."""

    def __init__(self, hardware: Hardware) -> None:
        self.hardware = hardware
        self._found: dict[str, TrialResult | None] = {}

    def __call__(self, config: RunConfig, store: Mapping[str, Any], batch_size: int) -> TrialResult | None:
        """Return the rate with up to `batch_size` samples; None if not even the smallest batch fits into memory."""
        shape = (config.workload, config.model, config.data.image_size, config.precision, config.optimizer.name)
        # Everything that changes the time of an eager step.
        key = repr((shape, config.train.activation_checkpointing, config.train.channels_last, batch_size))
        if key not in self._found:
            self._found[key] = measure_trial(_build_step(config, store, self.hardware), batch_size)
        return self._found[key]


def measure_trial(step: Callable[[int], float], batch_size: int) -> TrialResult | None:
    """Return the best rate, because other work only slows steps; `step` maps a number of samples to seconds."""
    best: TrialResult | None = None
    began, size, num_at_last_size = time.perf_counter(), min(SMALLEST, batch_size), 0
    while num_at_last_size < ENOUGH:
        try:
            seconds = step(size)
        except OutOfMemory:
            break
        if best is None or size / seconds > best.samples_per_s:
            best = TrialResult(samples_per_s=size / seconds, batch_size=size)
        left_s = TRIAL_S - (time.perf_counter() - began)
        if left_s < seconds:
            break
        if 2 * size <= batch_size and left_s > 4 * seconds:  # the first step of a size also sets up kernels
            size *= 2
        else:
            num_at_last_size += 1
    return best


def _build_step(config: RunConfig, store: Mapping[str, Any], hardware: Hardware) -> Callable[[int], float]:
    """Build an eager step of the run that maps a number of samples to seconds."""
    synthetic = KINDS.of(config.workload).synthetic
    assert synthetic is not None, "only workloads with synthetic data are tried"
    workload = synthetic.build(config, store, NoSamples())
    parts = assemble(config, workload, decide_plan(config, workload, hardware))
    engine = make_engine(parts, "eager", lambda text, level: None)

    @functools.lru_cache(maxsize=1)
    def load_window(num_samples: int) -> list[Batch]:
        sized = config.replace(train={"batch_size": num_samples})
        return [{name: value.to(parts.device) for name, value in synthetic.make_batch(sized, store).items()}]

    def step(num_samples: int) -> float:
        batches = load_window(num_samples)
        wait_for(parts.device)
        start = time.perf_counter()
        engine(batches)
        wait_for(parts.device)
        return time.perf_counter() - start

    return step
