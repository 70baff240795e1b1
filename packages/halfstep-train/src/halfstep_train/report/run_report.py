"""The output of a run and of its evaluation: header, bars, notices, summaries, records on disk.

On a terminal and in a notebook bars are live, elsewhere plain lines are printed; `quiet` keeps only warnings, errors
and the final summary. Warnings go to stderr, where `> log` does not hide them. A training run also writes all lines to
train.log, with one line per training record.
The report takes only strings and numbers: reading a tensor would make the host wait for the device.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from html import escape
from pathlib import Path
from typing import IO, Any, Literal, cast

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.file_proxy import FileProxy
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.text import Text

from halfstep.disk import refuse_special_file
from halfstep.errors import HalfstepError, format_count, format_duration, make_printable, summarise_error
from halfstep_train.report.console import dump_json, make_columns_table, make_pairs_table, print_text
from halfstep_train.report.listeners import Callbacks, Listener
from halfstep_train.report.metrics_file import MetricsFile

# --- results of evaluate and predict ---


Cell = str | int | float | None
SHOWN_CLASSES = 40
"""With more classes, show only the worst ones."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UsedRun:
    """The run that was used, and how."""

    run: str
    workload: str
    checkpoint: str
    weights: str
    precision: str
    simulated: bool
    device: str
    seconds: float = 0.0

    def describe_precision(self) -> str:
        """Return `bf16 on cuda:0`."""
        return f"{self.precision}{' (simulated)' if self.simulated else ''} on {self.device}"

    def to_json(self) -> str:
        """Return all fields as JSON."""
        return dump_json(asdict(self))


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationResult(UsedRun):
    """The result of one evaluation, as plain values."""

    data: str
    samples: int
    metrics: Mapping[str, float]
    """As validation computes them in training."""
    scoring: str = ""
    """How the metrics are computed, if their names do not say it."""
    scored_at: str = ""
    """Size at which masks were compared."""
    classes: tuple[Mapping[str, Cell], ...] = ()
    """One row per class; every row has the same columns, the first of which names the class."""
    ranking: str = ""
    """The column that ranks the classes."""
    hint: str = ""
    """Advice derived from the scores, if any."""
    files: tuple[str, ...] = ()


def show_evaluation(found: EvaluationResult, console: Console) -> None:
    """Print facts, scores, classes and written files."""
    facts = {
        "run": found.run,
        "checkpoint": f"{found.checkpoint}, weights {found.weights}",
        "data": f"{found.data}, {format_count(found.samples, 'sample')}",
        "precision": found.describe_precision(),
        "scores": found.scoring,
        "scored at": found.scored_at,
    }
    console.print(make_pairs_table(pair for pair in facts.items() if pair[1]), soft_wrap=True)
    console.print()
    whole = {name: value for name, value in found.metrics.items() if "/" not in name}
    console.print(Text("   ".join(f"{name} {value:.4f}" for name, value in whole.items()), style="bold"))
    if found.hint:
        print_text(console, Text(f"hint: {found.hint}", style="yellow"))
    if found.classes:
        console.print()
        _show_classes(found, console)
    console.print()
    for path in found.files:
        console.print(Text(f"wrote {path}", style="dim"), soft_wrap=True)


def _show_classes(found: EvaluationResult, console: Console) -> None:
    rows = list(found.classes)
    if len(rows) > SHOWN_CLASSES:
        rows = sorted(rows, key=lambda row: _rank_cell(row[found.ranking]))[:SHOWN_CLASSES]
        console.print(Text(f"The {len(rows)} worst of {len(found.classes)} classes by {found.ranking}:"))
    columns = {title: [format_cell(row[title]) for row in rows] for title in rows[0]}
    # Texts are left-aligned, numbers right-aligned.
    texts = [title for title in columns if any(isinstance(row[title], str) for row in rows)]
    console.print(make_columns_table(columns, left=texts), soft_wrap=True)


def _rank_cell(value: Cell) -> float:
    return float(value) if isinstance(value, int | float) else math.inf


def format_cell(value: Cell) -> str:
    """Format a cell: four decimals, thousands separators, a dash for None."""
    if value is None:
        return "-"
    return f"{value:.4f}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else value


SHOWN_FILES = 40
"""Rows printed if the results are also in a folder."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """The result for one file in two forms; each has the same columns for every file of a call."""

    file: str
    found: Mapping[str, Any]
    """For JSON."""
    brief: Mapping[str, str] = field(default_factory=dict)
    """For the console; default: `found`."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "brief", self.brief or {name: str(value) for name, value in self.found.items()})


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """A file that could not be used."""

    file: str
    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Predictions(UsedRun):
    """The result of one call, as plain values."""

    answers: tuple[Answer, ...]
    failed: tuple[Failure, ...] = ()
    out: str | None = None

    def to_json(self) -> str:
        """Return all fields as JSON."""
        whole = asdict(self)
        whole["predictions"] = [{"file": answer.file, **answer.found} for answer in self.answers]
        return dump_json({name: value for name, value in whole.items() if name != "answers"})


def show_predictions(made: Predictions, console: Console) -> None:
    """Print one row per file, then where the results are and how many files failed."""
    answers = made.answers[:SHOWN_FILES] if made.out else made.answers
    rows = [{"file": answer.file, **answer.brief} for answer in answers]
    if rows:
        table = make_columns_table({title: [row[title] for row in rows] for title in rows[0]}, left=rows[0])
        for column in table.columns:
            column.no_wrap, column.overflow = False, "fold"  # paths often differ only at their end
        console.print(table)
    if len(answers) < len(made.answers):
        console.print(Text(f"and {len(made.answers) - len(answers):,} more", style="dim"))
    where = f", written to {made.out}" if made.out else ""
    how = f"with {made.checkpoint} in {made.describe_precision()}{where}"
    console.print(Text(f"\n{format_count(len(made.answers), 'file')} {how}"), soft_wrap=True)
    if made.failed:
        console.print(Text(f"{len(made.failed):,} could not be used", style="yellow"))


# --- progress bars ---
#
# `advance` only counts. A thread of rich draws eight times per second, so the bar costs a step well under a
# microsecond.


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
            return f"in {format_duration(elapsed_s)}"
        return f"{format_duration((self.total - self.done) / steps_per_s)} left" if steps_per_s else ""

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
        self.warn(warnings)

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

    def warn(self, texts: Iterable[str]) -> None:
        for text in dict.fromkeys(texts):
            self.notice(text, "warning")

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
