"""The process that the others wait for."""

from __future__ import annotations

from collections.abc import Sequence

from halfstep.measure.clock import Stopwatch

WORTH_SAYING = 0.1
"""Of the time: below it waits are noise."""

WINDOW_S = 10.0
"""One slow step says little."""


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
