"""A progress bar for one pass over the data: live on a terminal, an occasional plain line elsewhere.

`advance` only counts. A thread of rich draws eight times per second, so the bar costs a step well under a microsecond.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from html import escape
from pathlib import Path
from typing import IO, Any, cast

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.file_proxy import FileProxy
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.text import Text

from halfstep.errors import format_count

REFRESHES_PER_S = 8
LINE_EVERY_S = 30.0
"""Seconds between lines in a log file."""
SUMMARISED_LINE_EVERY_S = 300.0
"""The same for a pass whose result is printed afterwards: at most two lines for each epoch of less than this."""
BAR_WIDTHS = (3, 24)
"""Minimum and maximum width in cells."""
NAMELESS_FIELDS = {"memory", "speed"}
"""Fields whose value explains itself: `4.8 GB`, `310 images/s`."""


Whole = Callable[[], tuple[str, str]]


class Bar:
    """The progress of one pass, drawn on one line of any width."""

    def __init__(
        self, label: str, total: int, *, whole: Whole | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`whole` returns the position in the whole run and its time left, which are shown instead of this pass's."""
        self.label, self.total, self.done = label, total, 0
        self.draw: Callable[[], object] = lambda: None
        """Called by the training thread, at most every `every_s`; a terminal has a thread that draws."""
        self.every_s, self.is_over = math.inf, False
        self._whole = whole
        self._shown: Mapping[str, str] = {}
        self._clock = clock
        self._start_s = self._drawn_s = clock()
        self._pace_from = self._start_s, 0

    def advance(self, shown: Mapping[str, str] | None = None, *, begins_pace: bool = False) -> None:
        """Count one step; `shown` replaces the fields, most important first.

        The first step does not count for the rate; `begins_pace` excludes all so far, which differ from those to come.
        """
        self.done += 1
        if begins_pace or self.done == 1:
            self._pace_from = self._clock(), self.done
        self.show(self._shown if shown is None else shown)

    def show(self, shown: Mapping[str, str]) -> None:
        """Replace the fields, most important first; draw if that is due: a single item may take minutes."""
        self._shown = shown
        # What is drawn after the last step is drawn at the end.
        if self._clock() - self._drawn_s >= self.every_s and self.done < self.total:
            self._drawn_s = self._clock()
            self.draw()

    def format_parts(self) -> list[str]:
        """Return the texts next to the bar, most important first."""
        now_s, done, (first_s, first_done) = self._clock(), self.done, self._pace_from
        steps_per_s = (done - first_done) / (now_s - first_s) if now_s > first_s else 0.0
        named = {name: value for name, value in self._shown.items() if name != "precision"}
        fields = [value if name in NAMELESS_FIELDS else f"{name} {value}" for name, value in named.items()]
        position, left = f"{done}/{self.total}", self._format_time(now_s - self._start_s, steps_per_s)
        if self._whole is not None and not self.is_over:
            position, left = self._whole()
        # The time left, the precision and the first two fields fit 80 columns.
        return [position, left, self._shown.get("precision", ""), *fields[:2], format_rate(steps_per_s), *fields[2:]]

    def _format_time(self, elapsed_s: float, steps_per_s: float) -> str:
        if self.is_over:
            return f"in {format_time(elapsed_s)}"
        return f"{format_time((self.total - self.done) / steps_per_s)} left" if steps_per_s else ""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draw the label, the bar and as many texts as fit the width."""
        narrowest, widest = BAR_WIDTHS
        # Cells, not characters: some characters are two cells wide.
        room = options.max_width - cell_len(self.label) - narrowest - 1
        tail = ""
        for part in filter(None, self.format_parts()):
            # Stop at the first that does not fit: showing later ones would make fields flicker.
            if cell_len(tail) + 1 + cell_len(part) > room:
                break
            tail += f" {part}"
        if not tail:
            yield Text(f"{self.label} {self.done}/{self.total}", overflow="ellipsis", no_wrap=True, end="")
            return
        yield Text(f"{self.label} ", end="")
        width = min(widest, room + narrowest - cell_len(tail))
        yield ProgressBar(total=max(self.total, 1), completed=self.done, width=width)
        yield Text(tail, end="")


@contextlib.contextmanager
def write_lines(bar: Bar, write: Callable[[str], None], *, is_summarised: bool = False) -> Iterator[None]:
    """Show a bar in a log file: a line when it begins, one every half minute, and one when it ends."""
    if bar.total and not is_summarised:  # the number of samples to draw is known only later
        write(f"{bar.label} 0/{bar.total}")
    bar.draw = lambda: write(" ".join([bar.label, *filter(None, bar.format_parts())]))
    bar.every_s = SUMMARISED_LINE_EVERY_S if is_summarised else LINE_EVERY_S
    try:
        yield
    finally:
        bar.is_over = True
        if not is_summarised:
            bar.draw()


NOTEBOOK_EVERY_S = 0.5


@contextlib.contextmanager
def show_in_notebook(bar: Bar, *, is_summarised: bool = False) -> Iterator[None]:
    """Show a bar in a Jupyter notebook: one output that is replaced at most twice a second."""
    from IPython.display import display  # a notebook has it

    def render() -> dict[str, str]:
        """Return the line as text and as HTML; the front end shows the HTML."""
        texts = " ".join(filter(None, bar.format_parts()))
        progress = f"<progress value={bar.done} max={max(bar.total, 1)}></progress>"
        html = f"<pre style='margin:0'>{escape(bar.label)} {progress} {escape(texts)}</pre>"
        return {"text/plain": f"{bar.label} {texts}", "text/html": html}

    output = cast(Any, display)(render(), raw=True, display_id=True)
    bar.draw, bar.every_s = lambda: output.update(render(), raw=True), NOTEBOOK_EVERY_S
    try:
        yield
    finally:
        bar.is_over = True
        output.update({"text/plain": "", "text/html": ""} if is_summarised else render(), raw=True)


@contextlib.contextmanager
def show_live(bar: Bar, console: Console, *, is_summarised: bool = False) -> Iterator[None]:
    """Keep the bar on the terminal's last line; restore the cursor however the block ends.

    A bar whose result is printed afterwards disappears at its end.
    """
    # rich's own redirection is off: see AboveBar.
    live = Live(
        bar,
        console=console,
        refresh_per_second=REFRESHES_PER_S,
        redirect_stdout=False,
        redirect_stderr=False,
        transient=is_summarised,
    )
    with contextlib.ExitStack() as stack:
        if sys.stdout.isatty():
            stack.enter_context(contextlib.redirect_stdout(AboveBar(console, sys.stdout)))
        if sys.stderr.isatty():
            stack.enter_context(contextlib.redirect_stderr(AboveBar(console, sys.stderr)))
        stack.enter_context(live)
        try:
            yield
        finally:
            bar.is_over = True


class AboveBar(FileProxy):
    """Prints other output above the bar; in a forked loader worker it writes directly.

    A fork may happen while the drawing thread holds the console's lock. It would never be released in the child, so the
    first warning printed there would hang the worker, and with it the training.
    """

    def __init__(self, console: Console, file: IO[str]) -> None:
        super().__init__(console, file)
        self._owner = os.getpid()

    def write(self, text: str) -> int:
        return super().write(text) if os.getpid() == self._owner else self.rich_proxied_file.write(text)

    def flush(self) -> None:
        super().flush() if os.getpid() == self._owner else self.rich_proxied_file.flush()


class PackingBar(contextlib.ExitStack):
    """Shows the progress of packing into a file, from the first report on, on standard error."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path
        self._bar: Bar | None = None

    @property
    def was_shown(self) -> bool:
        """True if anything was packed."""
        return self._bar is not None

    def __call__(self, done: int, total: int) -> None:
        if self._bar is None:
            console = Console(stderr=True)
            console.print(f"packing {format_count(total, 'image')} into {self._path}", soft_wrap=True, markup=False)
            self._bar = Bar("packing", total)
            self.enter_context(show_live(self._bar, console, is_summarised=True))
        self._bar.done = done


def format_rate(steps_per_s: float) -> str:
    """Format `3.3 it/s`, or `2.5 s/it` for slow steps; empty while unknown."""
    if not steps_per_s:
        return ""
    if steps_per_s < 1:
        return f"{1 / steps_per_s:.1f} s/it"
    return f"{steps_per_s:.{1 if steps_per_s < 100 else 0}f} it/s"


def format_time(seconds: float) -> str:
    """Format `0:45` or `1:02:03`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
