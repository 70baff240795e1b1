"""The output of a run: header, bars, notices, epoch summaries and final summary on the console, records on disk.

On a terminal and in a notebook bars are live, elsewhere plain lines are printed; `quiet` keeps only warnings, errors
and the final summary. Warnings go to stderr, where `> log` does not hide them. A training run also writes all lines to
train.log, with one line per training record.
The report takes only strings and numbers: reading a tensor would make the host wait for the device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from halfstep.disk import refuse_special_file
from halfstep.errors import HalfstepError, make_printable, summarise_error
from halfstep_train.report.console import make_columns_table, make_pairs_table, print_text
from halfstep_train.report.listeners import Callbacks, Listener
from halfstep_train.report.metrics_file import MetricsFile
from halfstep_train.report.progress import Bar, Whole, show_in_notebook, show_live, write_lines

Level = Literal["info", "warning", "error"]
STYLES: dict[Level, str] = {"info": "dim", "warning": "yellow", "error": "bold red"}

Rows = Sequence[tuple[str, str]]


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
        log: Path | None = None,
    ) -> None:
        if log is not None:
            refuse_special_file(log)
        self._log = log
        self._console = console or Console()
        self._warnings = console or Console(stderr=True)
        self._quiet, self._verbose = quiet, verbose
        self._metrics = MetricsFile(folder / "metrics.jsonl")
        self.folder, self._listeners, self._is_complete = folder, list(listeners), False

    def show_header(self, title: str, rows: Rows, *, warnings: Sequence[str]) -> None:
        """Print the header: workload, device, precision and reasons."""
        self._show_card(title, rows, border="cyan", is_hidden=self._quiet)
        for warning in dict.fromkeys(warnings):
            self.notice(warning, "warning")

    @contextlib.contextmanager
    def show_phase(
        self,
        label: str,
        total: int,
        *,
        whole: Whole | None = None,
        is_summarised: bool = False,
    ) -> Iterator[Bar]:
        """Show one pass over the data, such as `Epoch 1/100`; call `advance` of the bar once per step.

        `whole` returns the position and the time left of the whole run. `show_epoch` prints the result of a summarised
        pass, so its bar stays only if the report is verbose.
        """
        is_summarised &= not self._verbose
        bar = Bar(label, total, whole=whole)
        if self._quiet:
            shown: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        elif self._console.is_jupyter:
            shown = show_in_notebook(bar, is_summarised=is_summarised)
        elif self._console.is_interactive:
            shown = show_live(bar, self._console, is_summarised=is_summarised)
        else:
            shown = write_lines(bar, self._print_line, is_summarised=is_summarised)
        with shown:
            yield bar

    def notice(self, text: str, level: Level = "info") -> None:
        """Print one message, above the bar if there is one."""
        if level != "info":
            self._print_line(f"{level}: {text}", style=STYLES[level], console=self._warnings)
        else:
            self._print_line(text, style=STYLES[level], is_hidden=self._quiet)

    def show_epoch(self, label: str, lines: Sequence[str], rows: Sequence[tuple[str, str, str]]) -> None:
        """Print the lines of an epoch; if verbose also each (name, train value, validation value) as a table."""
        for line in lines:
            self._print_line(line, is_hidden=self._quiet)
        if self._quiet or not self._verbose:
            return
        columns = dict(zip((label, "train", "val"), zip(*rows, strict=True), strict=False))
        shown = {title: cells for title, cells in columns.items() if any(cells)}
        self._console.print(make_columns_table(shown, left=(label,)))

    def log(self, record: Mapping[str, object]) -> None:
        """Append one record to metrics.jsonl, and pass it on to trackers and callbacks."""
        self._metrics.append(record)
        if record.get("kind") == "train" and self._log is not None:
            self._write_to_log(format_train_record(record))
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

    def _show_card(self, title: str, rows: Rows, *, border: str, is_hidden: bool = False) -> None:
        """Print a panel on a terminal or in a notebook, plain lines elsewhere."""
        has_panel = self._console.is_interactive or self._console.is_jupyter
        lines = "\n".join([title, *(f"  {name}: {value}" for name, value in rows)])
        self._print_line(lines, is_hidden=is_hidden or has_panel)
        if is_hidden or not has_panel:
            return None
        grid = make_pairs_table(rows)
        return self._console.print(Panel(grid, title=Text(title, style="bold"), border_style=border, expand=False))

    def _print_line(
        self, text: str, style: str = "", *, console: Console | None = None, is_hidden: bool = False
    ) -> None:
        """Print a text and write it to train.log; a hidden one is only written."""
        self._write_to_log(text)
        # Text, not a string: `[Train]` and file names with brackets are not markup.
        if not is_hidden:
            print_text(console or self._console, Text(text, style=style))

    def _write_to_log(self, text: str) -> None:
        if self._log is None:
            return
        try:
            # Opened for each text, so that it is complete if the run is killed.
            with self._log.open("a", encoding="utf-8") as file:
                file.writelines(f"{make_printable(line)}\n" for line in text.split("\n"))
        except OSError as error:
            path, self._log = self._log, None
            self.notice(f"cannot write {path}: {error.strerror}; metrics.jsonl has every record", "warning")


def format_train_record(record: Mapping[str, object]) -> str:
    """Format `[Train Step] 20/400: loss: 0.2345, lr: 1e-05, 41.2 samples/s`; phases have their name in front."""
    named = [
        f"{' '.join(reversed(name.split('/')))}: {value:.4g}"
        for name, value in record.items()
        if name.split("/")[0] in ("loss", "lr") and isinstance(value, (int, float))
    ]
    position, speed = f"{record['step']}/{record['total_steps']}", f"{record['samples_per_s']} samples/s"
    return f"[Train Step] {position}: {', '.join(named)}, {speed}"
