"""How fast a run goes and what it waits for: data, the slowest process, the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from halfstep.config.schema import RunConfig, is_import_path
from halfstep.data.image_samples import TrainingFiles
from halfstep.data.loader import Samples
from halfstep.errors import format_count, suggest_command
from halfstep.hardware.clock import Stopwatch
from halfstep.hardware.gpus import find_known
from halfstep.hardware.monitor import Monitor
from halfstep.precision.plan import Plan
from halfstep.tune.modes import UNCAPTURED, Mode
from halfstep.workloads.base.kind import Unit

WORTH_SAYING = 0.1  # share of the time below which waiting is nobody's business


@dataclass(kw_only=True, slots=True)
class Waiting:
    """Host seconds of training, and those of them blocked in fetching batches."""

    trained_s: float = 0.0
    waited_s: float = 0.0
    start_s: float = 0.0
    """Of `trained_s`: until steps were compiled and captured."""
    start_waited_s: float = 0.0
    """Of `waited_s`: in that time."""

    def add(self, trained_s: float, waited_s: float) -> None:
        self.trained_s += trained_s
        self.waited_s += waited_s

    @property
    def share(self) -> float:
        return self.waited_s / self.trained_s if self.trained_s else 0.0

    @property
    def is_worth_saying(self) -> bool:
        return self.share > WORTH_SAYING


def way_out(config: RunConfig, samples: Samples, cores: int) -> str:
    """The setting that gets data faster here: more workers while cores are free, then no more decoding."""
    workers = config.data.num_workers
    if workers < cores:
        return f"data.num_workers={cores} (now {workers}, and this machine has {format_count(cores, 'core')})"
    if isinstance(samples, TrainingFiles):
        pack = suggest_command("pack", config.data.dir)
        return f"data.cache=true, or first {pack} (all {format_count(cores, 'core')} decode pictures already)"
    has_size = "image_size" in type(config.data).model_fields and not is_import_path(config.workload)
    smaller = "a smaller data.image_size, or " if has_size else ""
    return f"{smaller}more cores (data.num_workers={workers} uses all {cores})"


# --- model FLOPs utilisation (Chowdhery et al. 2022) ---
# A model's own operations over what the device could do at its peak: the vendor's, dense and with fp32 accumulation, in
# the format that matmuls compute in. Operations that are run twice to save memory count once, so recomputing lowers it.

PUBLISHED_AS = {"fp8": "fp8_e4m3"}


def peak_flops(plan: Plan) -> float | None:
    """Of the plan's device in its format; None where no public document says it."""
    known = find_known(plan.device_name) if plan.device.startswith("cuda") else None
    tflops = known.tflops.get(PUBLISHED_AS.get(plan.compute, plan.compute)) if known is not None else None
    return tflops * 1e12 if tflops else None


def utilisation(unit: Unit, samples_per_s: float, peak: float | None) -> float | None:
    return samples_per_s * unit.flops_per_sample / peak if peak and unit.flops_per_sample else None


# --- the slowest process ---

WINDOW_S = 10.0  # one slow step says little


class Lagging:
    """Who is slowest in the last seconds, by how long each process waited for the others."""

    def __init__(self) -> None:
        self._clock, self._waits_s = Stopwatch(), list[float]()

    def add(self, waits_s: Sequence[float]) -> None:
        # A resumed run begins with readings of as many processes as there were before.
        own = self._waits_s if len(self._waits_s) == len(waits_s) else [0.0] * len(waits_s)
        self._waits_s = [before + more for before, more in zip(own, waits_s, strict=True)]

    def said(self) -> str:
        """`rank 3, others wait 24%`; empty where nobody lags."""
        waits_s, elapsed_s = self._waits_s, self._clock.elapsed_s
        if elapsed_s > WINDOW_S:
            self._waits_s = []
            self._clock.restart()
        if len(waits_s) < 2 or elapsed_s <= 0:
            return ""
        share = (max(waits_s) - min(waits_s)) / elapsed_s
        return f"rank {waits_s.index(min(waits_s))}, others wait {share:.0%}" if share > WORTH_SAYING else ""


# --- how busy the GPU was ---

START_STEPS: dict[Mode, int] = {"eager": 1, "compile": 2, "graph": UNCAPTURED + 1}
"""Of a process, by mode: until kernels are chosen, compiled and captured."""
BUSY = 80.0  # percent below which the summary says why
SHORTEST_S = 10.0  # below that NVML's averages say nothing of a run


def how_busy(monitor: Monitor, waiting: Waiting, elapsed_s: float, mode: Mode) -> str:
    """One line for the summary; empty on a device that cannot say."""
    if not monitor.is_able:
        return ""
    if monitor.trouble:
        return f"not recorded to the end: {monitor.trouble}"
    return busy_line(monitor.utilization, waiting, elapsed_s, mode)


def busy_line(utilization: float | None, waiting: Waiting, elapsed_s: float, mode: str) -> str:
    """How busy the GPU was after the start of the run, in which steps are compiled and captured."""
    steady_s = elapsed_s - waiting.start_s
    if utilization is None or steady_s < SHORTEST_S:
        return "not measurable: the run was too short"
    after = f" after a start of {waiting.start_s:.0f} s" if waiting.start_s >= SHORTEST_S else ""
    shown = f"{utilization:.0f}% busy{after}"
    if utilization >= BUSY:
        return shown
    return f"{shown}, under {BUSY:.0f}%: {why_idle(utilization, waiting, elapsed_s, mode)}"


def why_idle(utilization: float, waiting: Waiting, elapsed_s: float, mode: str) -> str:
    """What the GPU waited for most after the start: data, what comes between steps, or the host."""
    steady_s = elapsed_s - waiting.start_s
    data = (waiting.waited_s - waiting.start_waited_s) / steady_s
    between = max(elapsed_s - waiting.trained_s, 0.0) / steady_s
    host = max(1 - utilization / 100 - data - between, 0.0)
    faster = "a larger batch" if mode == "graph" else "a larger batch, or train.fast=graph"
    reasons = {
        f"{data:.0%} of the time it waited for data": data,
        f"{between:.0%} of the time went to validation and checkpoints": between,
        f"{host:.0%} of the time it waited for the host (small steps: {faster})": host,
    }
    return max(reasons, key=lambda reason: reasons[reason])
