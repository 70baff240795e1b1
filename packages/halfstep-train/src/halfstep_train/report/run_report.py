"""The output of a run: header, bars, notices, epoch summaries and final summary on the console, records on disk.

On a terminal and in a notebook bars are live, elsewhere plain lines are printed; `quiet` keeps only warnings, errors
and the final summary. Warnings go to stderr, where `> log` does not hide them.
The report takes only strings and numbers: reading a tensor would make the host wait for the device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from halfstep.disk import GONE, redirect_to_null
from halfstep.errors import ConfigError, HalfstepError, summarise_error
from halfstep_train.report.console import print_text
from halfstep_train.report.listeners import Callbacks, Listener
from halfstep_train.report.metrics_file import MetricsFile
from halfstep_train.report.progress import Bar, LineBar, NotebookBar, show_live

Level = Literal["info", "warning", "error"]
STYLES: dict[Level, str] = {"info": "dim", "warning": "yellow", "error": "bold red"}

Rows = Sequence[tuple[str, str]]


class DeafConsole(Console):
    """A console that survives a closed pipe: `halfstep train ... | head` must not end a run."""

    def _check_buffer(self) -> None:
        try:
            super()._check_buffer()
        except OSError as error:
            if error.errno not in GONE:
                raise explain_unwritable_output(error) from error
            self.on_broken_pipe()

    def on_broken_pipe(self) -> None:
        self.quiet = True
        redirect_to_null(self.file.fileno())


def explain_unwritable_output(error: OSError) -> ConfigError:
    """Return the error for output that cannot be written, usually because the disk is full."""
    return ConfigError(
        f"cannot write the output: {error.strerror}",
        fix="free disk space, or redirect the output: > FILE",
    )


class RunReport:
    """The output of one run. A resumed run cuts its metrics file back before creating it."""

    def __init__(
        self,
        folder: Path,
        *,
        quiet: bool = False,
        verbose: bool = False,
        listeners: Sequence[Listener] = (),
        console: Console | None = None,
    ) -> None:
        self._console = console or DeafConsole()
        self._warnings = console or DeafConsole(stderr=True)
        self._quiet, self._verbose = quiet, verbose
        self._metrics = MetricsFile(folder / "metrics.jsonl")
        self.folder, self._listeners, self._is_complete = folder, list(listeners), False

    def show_header(self, title: str, rows: Rows, *, warnings: Sequence[str]) -> None:
        """Print the header: workload, device, precision and reasons."""
        if not self._quiet:
            self._show_card(title, rows, border="cyan")
        for warning in dict.fromkeys(warnings):
            self.notice(warning, "warning")

    @contextlib.contextmanager
    def show_phase(
        self,
        label: str,
        total: int,
        *,
        whole: Callable[[], tuple[str, str]] | None = None,
        is_summarised: bool = False,
    ) -> Iterator[Bar]:
        """Show one pass over the data, such as `Epoch 1/100`; call `advance` of the bar once per step.

        `whole` returns the position and the time left of the whole run. `show_epoch` prints the result of a summarised
        pass, so its bar stays only if the report is verbose.
        """
        is_summarised &= not self._verbose
        if self._quiet:
            yield Bar(label, total)
        elif self._console.is_jupyter:
            with NotebookBar(label, total, whole=whole, is_summarised=is_summarised) as notebook_bar:
                yield notebook_bar
        elif self._console.is_interactive:
            bar = Bar(label, total, whole=whole)
            with show_live(bar, self._console, is_summarised=is_summarised):
                yield bar
        else:
            with LineBar(label, total, write=self._print_line, whole=whole, is_summarised=is_summarised) as line_bar:
                yield line_bar

    def notice(self, text: str, level: Level = "info") -> None:
        """Print one message, above the bar if there is one."""
        if level != "info":
            self._print_line(f"{level}: {text}", style=STYLES[level], console=self._warnings)
        elif not self._quiet:
            self._print_line(text, style=STYLES[level])

    def show_epoch(self, label: str, lines: Sequence[str], rows: Sequence[tuple[str, str, str]]) -> None:
        """Print the lines of an epoch; if verbose also each (name, train value, validation value) as a table."""
        if self._quiet:
            return
        for line in lines:
            self._print_line(line)
        if not self._verbose:
            return
        has_validation = any(validation for *_, validation in rows)
        table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
        table.add_column(label, style="dim", header_style="bold")
        table.add_column("train", justify="right")
        if has_validation:
            table.add_column("val", justify="right", style="bold")
        for row in rows:
            table.add_row(*(Text(cell) for cell in (row if has_validation else row[:2])))
        self._console.print(table)

    def log(self, record: Mapping[str, object]) -> None:
        """Append one record to metrics.jsonl, and pass it on to trackers and callbacks."""
        self._metrics.append(record)
        self._tell(lambda listener: listener.add(record))

    @property
    def failure(self) -> HalfstepError | None:
        """Return the error of a callback, for which the run has to stop."""
        return next((one.failure for one in self._listeners if isinstance(one, Callbacks)), None)

    def add_files(self, files: Sequence[Path]) -> None:
        """Send these files of the run's folder to the trackers."""
        self._tell(lambda listener: listener.add_files(self.folder, files))

    @property
    def trackers(self) -> list[tuple[str, str]]:
        """Return the name of each tracker and how to see what it recorded."""
        return [(one.name, one.where) for one in self._listeners if not isinstance(one, Callbacks)]

    def _tell(self, pass_on: Callable[[Listener], None]) -> None:
        """Drop a tracker that fails, with a warning: a lost connection must not end a run."""
        for listener in list(self._listeners):
            try:
                pass_on(listener)
            except Exception as error:
                self._listeners.remove(listener)
                what = f"{type(error).__name__}: {summarise_error(error)}"
                self.notice(f"{listener.name} failed and gets no more records of this run ({what})", "warning")

    def finish(self, title: str, rows: Rows) -> None:
        """Print the final summary, even when quiet; the run is complete."""
        self._is_complete = True
        self._show_card(title, rows, border="green")

    def close(self) -> None:
        """Close the files and the trackers."""
        self._metrics.close()
        self._tell(lambda listener: listener.close(is_complete=self._is_complete))

    def _show_card(self, title: str, rows: Rows, *, border: str) -> None:
        """Print a panel on a terminal or in a notebook, plain lines elsewhere."""
        if not (self._console.is_interactive or self._console.is_jupyter):
            return self._print_line("\n".join([title, *(f"  {name}: {value}" for name, value in rows)]))
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="dim", no_wrap=True)
        grid.add_column(overflow="fold")
        for name, value in rows:
            grid.add_row(Text(name), Text(value))
        return self._console.print(Panel(grid, title=Text(title, style="bold"), border_style=border, expand=False))

    def _print_line(self, text: str, style: str = "", *, console: Console | None = None) -> None:
        # Text, not a string: `[Train]` and file names with brackets are not markup.
        print_text(console or self._console, Text(text, style=style))
