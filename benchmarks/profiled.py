"""A runner whose last steps, after those that are timed, are seen by the profiler."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from halfstep_train.bench.problem import AfterStep, Runner
from halfstep_train.bench.step_profile import NOT_WORK, classify_kernel, wake_profiler

STEPS, TOP = 3, 40


class Profiled:
    """Trains as its runner does; `table` says where the time of a step went."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.name, self.variant, self.precision = runner.name, runner.variant, runner.precision
        self.table: dict[str, Any] = {}
        wake_profiler(torch.device("cuda"))

    def train(self, steps: int, after_step: AfterStep) -> float:
        plan = schedule(wait=steps, warmup=1, active=STEPS, repeat=1)
        profiler = profile(activities=[ProfilerActivity.CUDA], schedule=plan, acc_events=True)
        made = 0

        def after() -> None:
            nonlocal made
            made += 1
            if made <= steps:
                after_step()
            else:
                torch.cuda.synchronize()
            profiler.step()

        with profiler:
            loss = self.runner.train(steps + 1 + STEPS, after)
        self.table = kernel_table(profiler)
        return loss


def kernel_table(profiler: profile) -> dict[str, Any]:
    """Milliseconds and launches of a step: by kind, and of the kernels that take most."""
    kinds: dict[str, float] = defaultdict(float)
    kernels: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    for event in profiler.events() or ():
        if event.device_type.name != "CUDA" or event.is_user_annotation or event.name in NOT_WORK:
            continue
        ms = (event.time_range.end - event.time_range.start) / 1e3 / STEPS
        kinds[str(classify_kernel(event.name))] += ms
        kernels[event.name[:140]][0] += ms
        kernels[event.name[:140]][1] += 1 / STEPS
    longest = sorted(kernels.items(), key=lambda item: -item[1][0])[:TOP]
    return {
        "kernel_ms": sum(kinds.values()),
        "launches": sum(number for _, number in kernels.values()),
        "kinds_ms": dict(sorted(kinds.items(), key=lambda item: -item[1])),
        "top": [{"ms": round(ms, 3), "launches": round(number, 1), "name": name} for name, (ms, number) in longest],
    }
