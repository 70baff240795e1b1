"""How busy the GPU was, and what it waited for."""

from __future__ import annotations

from dataclasses import dataclass

from halfstep.measure.monitor import Monitor
from halfstep.run.loop import Loop

BUSY = 80.0
"""Percent below which the summary says why."""
SHORTEST_S = 10.0
"""Below that NVML's averages say nothing of a run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Times:
    """Seconds of a run."""

    elapsed_s: float
    trained_s: float
    waited_s: float


def how_busy(monitor: Monitor, loop: Loop, elapsed_s: float) -> str:
    """One line for the summary; empty on a device that cannot say."""
    if not monitor.is_able:
        return ""
    if monitor.trouble:
        return f"not recorded to the end: {monitor.trouble}"
    times = Times(elapsed_s=elapsed_s, trained_s=loop.waiting.trained_s, waited_s=loop.waiting.waited_s)
    return busy_line(monitor.utilization, times)


def busy_line(utilization: float | None, times: Times) -> str:
    if utilization is None or times.elapsed_s < SHORTEST_S:
        return "not measurable: the run was too short"
    shown = f"{utilization:.0f}% busy"
    return shown if utilization >= BUSY else f"{shown}, under {BUSY:.0f}%: {why_idle(utilization, times)}"


def why_idle(utilization: float, times: Times) -> str:
    """What it waited for most: data, validation and what else stands between steps, or the host."""
    data = times.waited_s / times.elapsed_s
    between = max(times.elapsed_s - times.trained_s, 0.0) / times.elapsed_s
    host = max(1 - utilization / 100 - data - between, 0.0)
    reasons = {
        f"{data:.0%} of the time it waited for data": data,
        f"{between:.0%} of the time went to the start, validation and checkpoints": between,
        f"{host:.0%} of the time it waited for the host (small steps: a larger batch, or train.fast=graph)": host,
    }
    return max(reasons, key=lambda reason: reasons[reason])
