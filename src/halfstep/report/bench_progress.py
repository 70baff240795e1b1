"""How far a bench is: alive in a terminal's status line, a line a row elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable

from rich.console import Console
from rich.text import Text

from halfstep.report.progress import format_time


class RowsLeft:
    """Which row is measured, and about how long the rest takes if rows go on as those before."""

    def __init__(self, total: int, console: Console, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.total, self.done, self.row = total, -1, ""
        self._console, self._clock = console, clock
        self._start_s = self._row_start_s = clock()

    def begin(self, row: str) -> None:
        """The row before this one is done."""
        self.done += 1
        self.row, self._row_start_s = row, self._clock()
        if not self._console.is_terminal:  # where a status is not shown
            self._console.print(Text(f"measuring {self}"), soft_wrap=True)

    def left_s(self) -> float | None:
        """Seconds; None until a row is done, for nobody knows how long one takes."""
        if self.done < 1:
            return None
        a_row_s = (self._row_start_s - self._start_s) / self.done
        rest_of_this_s = max(0.0, a_row_s - (self._clock() - self._row_start_s))
        return rest_of_this_s + (self.total - self.done - 1) * a_row_s

    def __str__(self) -> str:
        left_s = self.left_s()
        estimate = "" if left_s is None else f", about {format_time(left_s)} left at the pace so far"
        return f"{self.row} (row {self.done + 1} of {self.total}{estimate})"

    def __rich__(self) -> Text:
        return Text(f"measuring {self}" if self.row else "measuring")
