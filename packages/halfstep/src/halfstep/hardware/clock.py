"""Host clocks. They never wait for the device; `wait_for` does.

The guard keeps the host at most two steps ahead of the device, so over a window of seconds host time is device time.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

Clock = Callable[[], float]
"""Seconds that only go forward."""


class Stopwatch:
    """Seconds since its creation or last restart."""

    def __init__(self, *, clock: Clock = time.perf_counter) -> None:
        self._clock = clock
        self._start_s = clock()

    @property
    def elapsed_s(self) -> float:
        return self._clock() - self._start_s

    def restart(self) -> float:
        """Start again from zero; returns the seconds of the lap that ended."""
        now_s = self._clock()
        lap_s, self._start_s = now_s - self._start_s, now_s
        return lap_s


class Throughput:
    """Samples per second over the last `window_s` seconds."""

    def __init__(self, *, window_s: float = 10.0, clock: Clock = time.perf_counter) -> None:
        self._window_s = window_s
        self._clock = clock
        self._total = 0
        self._marks: deque[tuple[float, int]] = deque()
        self.restart()

    def add(self, num_samples: int) -> None:
        """Count the samples of one step that was just issued."""
        now_s = self._clock()
        self._total += num_samples
        self._marks.append((now_s, self._total))
        # The mark just outside the window stays: it is the start of the first step inside the window.
        while len(self._marks) > 2 and self._marks[1][0] < now_s - self._window_s:
            self._marks.popleft()

    def compute_rate(self) -> float:
        """Return samples per second; zero before the end of the first step."""
        # Samples up to the first mark came before the window.
        (first_s, first_total), (last_s, last_total) = self._marks[0], self._marks[-1]
        return (last_total - first_total) / (last_s - first_s) if last_s > first_s else 0.0

    def restart(self) -> None:
        """Forget the window, so that a validation or a checkpoint in between does not count as training."""
        self._marks.clear()
        self._marks.append((self._clock(), self._total))


def wait_for(device: torch.device) -> None:
    """Wait until the device has finished all work given to it."""
    import torch

    if device.type != "cpu":
        torch.accelerator.synchronize(device)
