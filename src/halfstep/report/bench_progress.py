"""How far a bench is: alive in a terminal's status line, a line per row elsewhere."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence

from rich.console import Console
from rich.text import Text

from halfstep.report.progress import format_time


class RowsLeft:
    """Which row is measured, and about how long the rest takes if rows go on as those of their kind before.

    A compiled row takes minutes where an eager one takes seconds: while a kind is still to come of which no row is
    done, the time left is unknown.
    """

    def __init__(
        self,
        kinds: Sequence[str],
        console: Console,
        *,
        repeats_first: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`kinds`: of each row in order, such as `halfstep eager`. `repeats_first`: the first row comes again at the
        end, and will take as long as it did."""
        self.kinds = [*kinds, *(kinds[:1] if repeats_first else ())]
        self.total, self.repeats_first, self.row = len(self.kinds), repeats_first, ""
        self._console, self._clock = console, clock
        self._starts_s: list[float] = []

    @property
    def done(self) -> int:
        """Rows before this one."""
        return len(self._starts_s) - 1

    def begin(self, row: str) -> None:
        """The row before this one is done."""
        self._starts_s.append(self._clock())
        self.row = row
        if not self._console.is_terminal:  # where a status is not shown
            self._console.print(Text(f"measuring {self}"), soft_wrap=True)

    def left(self) -> str:
        """`, about 1:20 left`; nothing until a row is done, and `unknown` until one of each kind is."""
        if self.done < 1:
            return ""
        # The first row's second measurement is known by the first one.
        if not set(self.kinds[self.done : self.total - self.repeats_first]) <= set(self.kinds[: self.done]):
            return ", time left unknown"
        this_s = self._expected_s(self.done) - (self._clock() - self._starts_s[-1])
        others_s = sum(self._expected_s(index) for index in range(self.done + 1, self.total))
        # A row that takes longer than those before it: only the others are known.
        return f", {'about' if this_s >= 0 else 'over'} {format_time(max(0.0, this_s) + others_s)} left"

    def _expected_s(self, index: int) -> float:
        """As the row that comes again, or as the mean of its kind."""
        taken_s = [end - start for start, end in itertools.pairwise(self._starts_s)]
        if self.repeats_first and index == self.total - 1:
            return taken_s[0]
        alike_s = [taken for taken, kind in zip(taken_s, self.kinds, strict=False) if kind == self.kinds[index]]
        return sum(alike_s) / len(alike_s)

    def __str__(self) -> str:
        return f"{self.row} (row {self.done + 1} of {self.total}{self.left()})"

    def __rich__(self) -> Text:
        return Text(f"measuring {self}" if self.row else "measuring")
