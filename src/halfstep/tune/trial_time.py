"""The clock that trials of modes run against: at most a minute, and at most a twentieth of the expected run.

Two accounts are kept apart:

    starts   the first step of each candidate, in which code is compiled and cuDNN tries its algorithms. Nothing can
             interrupt it, so what it usually takes is weighed before: all starts together must fit into a twentieth of
             the run. It is what a run in that mode would begin with anyway, and compiled code is found again on disk.
    steps    everything else. The clock bounds it: asked before each candidate, and for how many steps one is timed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager

from halfstep.config.schema import RunConfig
from halfstep.hardware.clock import Clock, Stopwatch

MOST_S = 60.0
SHARE = 0.05  # of the expected run that may be spent on finding out how to run it
CANDIDATES = 4
"""One candidate is timed for a fourth of the time at most: the first must not use up what the others need."""


class TrialTime:
    def __init__(
        self, num_steps: float = math.inf, *, most_s: float = math.inf, clock: Clock = time.perf_counter
    ) -> None:
        self.num_steps, self.most_s, self.clock = num_steps, most_s, clock
        self.run_s: float | None = None  # what the run is expected to take; None before anything was timed
        self.starts_s = 0.0
        self._total = Stopwatch(clock=clock)

    def expect(self, step_s: float) -> None:
        """A step takes so long: now it is known how long the run will be."""
        self.run_s = step_s * self.num_steps

    @property
    def limit_s(self) -> float:
        return self.most_s if self.run_s is None else min(self.most_s, SHARE * self.run_s)

    @property
    def spent_s(self) -> float:
        """On everything but the candidates' starts."""
        return self._total.elapsed_s - self.starts_s

    @property
    def is_over(self) -> bool:
        return self.spent_s >= self.limit_s

    @property
    def for_one_s(self) -> float:
        """What one candidate may be timed for, beginning now."""
        return max(0.0, min(self.limit_s / CANDIDATES, self.limit_s - self.spent_s))

    def has_room_for(self, start_s: float) -> bool:
        """Whether a start that usually takes this long fits into the run's share, with the starts before it.

        What starts nothing has room: a slow start before it is no reason to leave it out.
        """
        return start_s == 0 or self.run_s is None or self.starts_s + start_s <= SHARE * self.run_s

    @contextmanager
    def starting(self) -> Iterator[None]:
        start = Stopwatch(clock=self.clock)
        try:
            yield
        finally:
            self.starts_s += start.elapsed_s


def total_steps_of(config: RunConfig, num_batches: int) -> int:
    """Steps to the end of the run, if nothing stops it early."""
    planned = config.train.epochs * math.ceil(num_batches / config.train.accumulate)
    return min(planned, config.train.max_steps) if config.train.max_steps else planned
