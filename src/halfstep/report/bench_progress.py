"""How far a bench is: alive in a terminal's status line, a line a row elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable

from rich.console import Console
from rich.text import Text

from halfstep.report.progress import format_time


class RowsLeft:
    """Which row is measured, and about how long the rest takes if rows go on as those before."""

    def __init__(
        self,
        total: int,
        console: Console,
        *,
        repeats_first: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`repeats_first`: the last row is the first one again, and will take as long as that did."""
        self.total, self.repeats_first, self.row = total, repeats_first, ""
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
        """`, about 1:20 left`; nothing until a row is done, for nobody knows how long one takes."""
        if self.done < 1:
            return ""
        this_s = self._expected_s(self.done) - (self._clock() - self._starts_s[-1])
        others_s = sum(self._expected_s(index) for index in range(self.done + 1, self.total))
        # A row that takes longer than any guess: only the others are known.
        return f", {'about' if this_s >= 0 else 'over'} {format_time(max(0.0, this_s) + others_s)} left"

    def _expected_s(self, index: int) -> float:
        """As the row that comes again, or as the mean of all that are done."""
        until = 1 if self.repeats_first and index == self.total - 1 else self.done
        return (self._starts_s[until] - self._starts_s[0]) / until

    def __str__(self) -> str:
        return f"{self.row} (row {self.done + 1} of {self.total}{self.left()})"

    def __rich__(self) -> Text:
        return Text(f"measuring {self}" if self.row else "measuring")
