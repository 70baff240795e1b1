"""A short real trial of a suggestion: its model learns from made-up images on the device itself, and is timed.

The batch doubles from two samples on, up to the suggested one, while there is time: a few seconds for each trial, which
a slow device spends on a small batch and a fast one on the whole. Steps are the run's own, but eager.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from halfstep.config.schema import RunConfig
from halfstep.hardware.clock import wait_for
from halfstep.hardware.facts import Hardware
from halfstep.run.assemble import assemble, decide_plan
from halfstep.run.engine import make_engine
from halfstep.run.memory.out_of_memory import OutOfMemory
from halfstep.run.memory.traceable_step import NoSamples
from halfstep.workloads import KINDS
from halfstep.workloads.base.workload import Batch

TRIAL_S = 3.0
"""No step is begun that would end later."""
ENOUGH = 4
"""Steps at the largest size, of which the first is slower."""
SMALLEST = 2
"""BatchNorm refuses to learn from one value per channel."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """What one trial found."""

    samples_per_s: float
    batch_size: int


class Trials:
    """Trials on one device, each made once: suggestions often differ only in how long they train."""

    def __init__(self, hardware: Hardware) -> None:
        self.hardware = hardware
        self._found: dict[str, Trial | None] = {}

    def __call__(self, config: RunConfig, store: Mapping[str, Any], batch_size: int) -> Trial | None:
        """The rate of steps with up to `batch_size` samples; None where not even the smallest fits the memory."""
        shape = (config.workload, config.model, config.data.image_size, config.precision, config.optimizer.name)
        key = repr((shape, config.train.activation_checkpointing, config.train.channels_last, batch_size))
        if key not in self._found:
            self._found[key] = measure_trial(_build_step(config, store, self.hardware), batch_size)
        return self._found[key]


def measure_trial(step: Callable[[int], float], batch_size: int) -> Trial | None:
    """The best rate that was seen, since other work only slows; `step` takes a number of samples, gives its seconds."""
    best: Trial | None = None
    began, size, num_at_last_size = time.perf_counter(), min(SMALLEST, batch_size), 0
    while num_at_last_size < ENOUGH:
        try:
            seconds = step(size)
        except OutOfMemory:
            break
        if best is None or size / seconds > best.samples_per_s:
            best = Trial(samples_per_s=size / seconds, batch_size=size)
        left_s = TRIAL_S - (time.perf_counter() - began)
        if left_s < seconds:
            break
        if 2 * size <= batch_size and left_s > 4 * seconds:  # the first one of a size also sets kernels up
            size *= 2
        else:
            num_at_last_size += 1
    return best


def _build_step(config: RunConfig, store: Mapping[str, Any], hardware: Hardware) -> Callable[[int], float]:
    """A step of the run itself, eager: it takes a number of samples and gives its seconds."""
    synthetic = KINDS.of(config.workload).synthetic
    assert synthetic is not None, "only workloads with synthetic data are tried"
    workload = synthetic.build(config, store, NoSamples())
    parts = assemble(config, workload, decide_plan(config, workload, hardware))
    engine = make_engine(parts, "eager", lambda text, level: None)

    @functools.lru_cache(maxsize=1)
    def window(num_samples: int) -> list[Batch]:
        sized = config.changed(train={"batch_size": num_samples})
        return [{name: value.to(parts.device) for name, value in synthetic.make_batch(sized, store).items()}]

    def step(num_samples: int) -> float:
        batches = window(num_samples)
        wait_for(parts.device)
        start = time.perf_counter()
        engine(batches)
        wait_for(parts.device)
        return time.perf_counter() - start

    return step
