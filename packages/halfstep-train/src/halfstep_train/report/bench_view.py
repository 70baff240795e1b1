"""Show a benchmark: its progress, the table of its rows, and a picture with bars of time and memory."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from halfstep.errors import format_count
from halfstep_train.report.config_view import format_setting
from halfstep_train.report.console import make_columns_table, print_text, split_columns
from halfstep_train.report.picture_file import FAINT, INK, make_figure, save_figure
from halfstep_train.report.progress import format_time

if TYPE_CHECKING:
    from matplotlib.axes import Axes


Record = Mapping[str, Any]
NOTHING = "-"
WHO = ("who", "mode", "precision")
OLDER_UNIT = {"name": "sample", "per_sample": 1}
"""Unit of stored results in benchmarks/results that do not name one."""


def show_bench(record: Record, console: Console) -> None:
    """Print title, table, unmeasured rows with reasons, remarks and warnings."""
    rows = record["rows"]
    console.print(Text(format_title(record), style="bold"), soft_wrap=True)
    measured = [row for row in rows if row["window_ms"]]
    columns = _build_columns(measured, record.get("unit", OLDER_UNIT))
    for table in split_columns(columns, console.width, names=WHO) if measured else ():
        console.print(make_columns_table(table, left=WHO))
    missing = [f"not measured: {_format_label(row)}: {row['reason']}" for row in rows if not row["window_ms"]]
    remarks = [f"{_format_label(row)}: {remark}" for row in measured for remark in row["remarks"]]
    for line in (
        *_describe_reduction(record["problem"]),
        *missing,
        *remarks,
        *_explain_columns(record, measured, columns),
    ):
        print_text(console, Text(line, style="dim"))
    for warning in record["warnings"]:
        print_text(console, Text(f"warning: {warning}", style="yellow"))


def format_title(record: Record) -> str:
    """Format `unet, 31.0M parameters, batch 8, 512 pixels, adamw, clip 1: NVIDIA H200, torch 2.11.0`."""
    return f"{format_problem(record)}: {record['device']}, torch {record['versions']['torch']}"


def format_problem(record: Record) -> str:
    """Format `unet, 31.0M parameters, batch 8, 512 pixels, adamw, clip 1`."""
    problem = record["problem"]
    # Stored benchmarks without `sample_size` are all of images.
    size = record.get("sample_size", f"{problem['image_size']} pixels")
    parameters = f"{' reduced to' if problem.get('reduced') else ','} {_format_count(problem['parameters'])} parameters"
    return (
        f"{problem['workload']}{parameters}, batch {problem['batch_size']}, "
        f"{f'{size}, ' if size else ''}{problem['optimizer']}, clip {problem['clip_norm']:g}"
    )


def _describe_reduction(problem: Record) -> Iterator[str]:
    """Yield how the network differs from the workload's default."""
    if changed := problem.get("reduced"):
        settings = ", ".join(f"{path}={format_setting(value)}" for path, value in changed.items())
        yield f"reduced: this is the demo's small network ({settings}); data.dir=DIR times the full one"


def _format_count(number: int) -> str:
    return f"{format_digits(number / 1e6)}M" if number >= 1e6 else f"{number:,}"


def format_digits(value: float | None, significant: int = 3) -> str:
    """Format with significant digits and without exponent: 0.0993, 25.1, 247, 5526."""
    if value is None:
        return NOTHING
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    return f"{value:.{max(0, significant - 1 - math.floor(math.log10(abs(value))))}f}"


def format_start(row: Record) -> str:
    """Format the seconds to the first step and the state of the compiler's cache."""
    return f"{format_digits(row['start_s'])} {row['cache']}".rstrip()


def _build_columns(rows: Sequence[Record], unit: Record) -> dict[str, list[str]]:
    """Build the cells of the measured rows by column title."""

    def format_each(name: str, scale: float = 1.0, significant: int = 3) -> list[str]:
        return [format_digits(None if row[name] is None else row[name] * scale, significant) for row in rows]

    columns = {
        "who": [row["name"] for row in rows],
        "mode": [row["variant"] for row in rows],
        "precision": [row["precision"] + " simulated" * row["simulated"] for row in rows],
        "ms/step": format_each("ms", significant=4),
        "windows": [f"{format_digits(row['ms_min'], 4)}–{format_digits(row['ms_max'], 4)}" for row in rows],
        f"{unit['name']}s/s": format_each("samples_per_s", unit["per_sample"], significant=4),
        "x fp32": [_format_speedup(row, "speedup_fp32") for row in rows],
        "x tf32": [_format_speedup(row, "speedup_tf32") for row in rows],
        "peak GB": format_each("peak_bytes", 1e-9),
        "reserved": format_each("reserved_bytes", 1e-9),
        f"J/{unit['name']}": format_each("joules_per_sample", 1 / unit["per_sample"]),
        "of floor": [NOTHING if row["floor_share"] is None else f"{row['floor_share']:.0%}" for row in rows],
        "loss": format_each("loss", significant=4),
        "start s": [format_start(row) for row in rows],
    }
    # Drop columns of dashes only, such as energy on a CPU.
    return {name: cells for name, cells in columns.items() if any(cell != NOTHING for cell in cells)}


def _format_speedup(row: Record, name: str) -> str:
    return NOTHING if row[name] is None else f"{row[name]:.2f}"


def _explain_columns(record: Record, rows: Sequence[Record], columns: Iterable[str]) -> list[str]:
    """Return explanations of the columns whose titles could mislead."""
    if not rows:
        return []
    meanings = {
        "ms/step": f"median of {len(rows[0]['window_ms'])} windows of {format_count(record['window_steps'], 'step')}, "
        "including the copy of the batch to the device; windows: fastest to slowest; rate: at the median",
        **{f"x {name}": f"times as fast as {label}" for name, label in record["speedup_bases"].items()},
        "loss": f"after {format_count(record['steps'], 'step')} on one random batch, compared with "
        f"{record['loss_reference']} within {record['loss_bound']:.0%}",
        "of floor": "time of the counted arithmetic at the measured matmul rate, as a share of the step",
    }
    lines = [f"{name}: {meanings[name]}" for name in columns if name in meanings]
    return [*lines, f"memory: {record['memory']}"]


def _format_label(row: Record) -> str:
    return " ".join(filter(None, (row["name"], row["variant"], row["precision"])))


COLOURS = {"fp32": "#616e7c", "tf32": "#8e44ad", "bf16": "#2f6fde", "fp16": "#0b9ac0", "fp8": "#12805c"}
OTHER = "#b7791f"
PEER_ALPHA = 0.45
"""Peers are drawn paler than halfstep's rows."""
INCHES_PER_ROW = 0.36
ROOM_FOR_LABELS = 1.55
"""Width of the axis relative to the longest bar, with room for the numbers after the bars."""


def draw_bench(record: Record, path: Path) -> None:
    """Draw the measured rows, except simulated ones, whose times mean nothing."""
    rows = [row for row in record["rows"] if row["window_ms"] and not row["simulated"]]
    figure = make_figure((11.5, 1.5 + INCHES_PER_ROW * max(len(rows), 2)))
    figure.suptitle(format_title(record), x=0.01, ha="left", fontsize=11, fontweight="bold", color=INK)
    has_memory = any(row["peak_bytes"] for row in rows)
    panels = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2)) if has_memory else [figure.subplots()]
    _draw_times(panels[0], rows, record.get("unit", OLDER_UNIT))
    if has_memory:
        _draw_memory(panels[1], rows)
    if notes := list(_explain_gaps(record, len(rows), has_memory=has_memory)):
        figure.supxlabel("\n".join(notes), x=0.01, ha="left", fontsize=8.5, color=FAINT)
    save_figure(figure, path)


def _explain_gaps(record: Record, num_drawn: int, *, has_memory: bool) -> Iterator[str]:
    """Yield what is missing in the picture, and why."""
    if num_drawn and not has_memory:
        yield f"memory: {record['memory']}"
    if left_out := len(record["rows"]) - num_drawn:
        rows = format_count(left_out, "row")
        yield f"not drawn: {rows} that could not be measured or are simulated"


def _draw_times(axes: Axes, rows: Sequence[Record], unit: Record) -> None:
    _draw_bars(axes, rows, [row["ms"] for row in rows], "time per step, ms (line: fastest to slowest window)")
    _draw_spreads(axes, rows)
    _draw_labels(axes, [row["ms_max"] for row in rows], [_format_time_label(row, unit) for row in rows])


def _draw_memory(axes: Axes, rows: Sequence[Record]) -> None:
    sizes = [(row["peak_bytes"] or 0) / 1e9 for row in rows]
    _draw_bars(axes, rows, sizes, "peak memory, GB")
    _draw_labels(axes, sizes, [f"{format_digits(size)} GB" if size else "not counted" for size in sizes])


def _draw_bars(axes: Axes, rows: Sequence[Record], lengths: Sequence[float], name: str) -> None:
    places = range(len(rows))
    bars = axes.barh(places, lengths, height=0.7, color=[COLOURS.get(row["precision"], OTHER) for row in rows])
    for bar, row in zip(bars, rows, strict=True):
        bar.set_alpha(1.0 if row["name"] == "halfstep" else PEER_ALPHA)
    axes.set_yticks(places, [f"{row['name']} {row['variant']}  {row['precision']}" for row in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)  # the first row on top
    axes.set_xlim(0, ROOM_FOR_LABELS * max(lengths, default=1.0) or 1.0)
    axes.set_xlabel(name, fontsize=9, color=FAINT)
    axes.tick_params(labelsize=9, labelcolor=INK, length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)


def _draw_spreads(axes: Axes, rows: Sequence[Record]) -> None:
    for place, row in enumerate(rows):
        for colour, width in (("white", 4.0), (INK, 1.6)):  # a white edge, visible on a dark bar
            ends = [row["ms_min"], row["ms_max"]]
            axes.plot(ends, [place, place], color=colour, linewidth=width, solid_capstyle="butt")


def _draw_labels(axes: Axes, ends: Sequence[float], labels: Sequence[str]) -> None:
    for place, (end, label) in enumerate(zip(ends, labels, strict=True)):
        axes.annotate(label, (end, place), (5, 0), textcoords="offset points", va="center", fontsize=8.5, color=INK)


def _format_time_label(row: Record, unit: Record) -> str:
    rate = format_digits(row["samples_per_s"] * unit["per_sample"], 4)
    facts = [f"{format_digits(row['ms'], 4)} ms", f"{rate} {unit['name']}s/s"]
    facts += [f"{row['speedup_fp32']:.1f}x fp32"] if row["speedup_fp32"] is not None else []
    return "  ".join(facts)


class RowsLeft:
    """Shows which row is measured, and estimates the time left from finished rows of the same kind.

    A compiled row takes minutes, an eager one seconds, and one in an emulated format hours: until a row of each
    remaining kind is done, only the least time left is known.
    """

    def __init__(
        self,
        kinds: Sequence[str],
        console: Console,
        *,
        repeats_first: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Show rows as they are measured. `kinds`: the kind of each row in order, such as `halfstep eager`.
        `repeats_first`: the first row is measured again at the end."""
        self.kinds = [*kinds, *(kinds[:1] if repeats_first else ())]
        self.total, self.repeats_first, self.row = len(self.kinds), repeats_first, ""
        self._console, self._clock = console, clock
        self._starts_s: list[float] = []

    @property
    def done(self) -> int:
        """Number of finished rows."""
        return len(self._starts_s) - 1

    def begin(self, row: str) -> None:
        """Start this row; the previous one is done."""
        self._starts_s.append(self._clock())
        self.row = row
        if not self._console.is_terminal:  # where a status is not shown
            self._console.print(Text(f"measuring {self}"), soft_wrap=True)

    def format_time_left(self) -> str:
        """Return `, about 1:20 left`; empty until a row is done, and a lower bound until one of each kind is."""
        if self.done < 1:
            return ""
        estimates = [self._estimate_s(index) for index in range(self.done, self.total)]
        spent_s = self._clock() - self._starts_s[-1]
        this_s = (estimates[0] or spent_s) - spent_s
        left_s = max(0.0, this_s) + sum(filter(None, estimates[1:]))
        if None in estimates:
            return f", at least {format_time(left_s)} left" if left_s else ", time left unknown"
        # If this row takes longer than expected, only the others can be estimated.
        return f", {'about' if this_s >= 0 else 'over'} {format_time(left_s)} left"

    def _estimate_s(self, index: int) -> float | None:
        """Estimate a row's time: that of the first for the repeated row, else the mean of its kind; None: unknown."""
        taken_s = [end - start for start, end in itertools.pairwise(self._starts_s)]
        if self.repeats_first and index == self.total - 1:
            return taken_s[0]
        alike_s = [taken for taken, kind in zip(taken_s, self.kinds, strict=False) if kind == self.kinds[index]]
        return sum(alike_s) / len(alike_s) if alike_s else None

    def __str__(self) -> str:
        return f"{self.row} (row {self.done + 1} of {self.total}{self.format_time_left()})"

    def __rich__(self) -> Text:
        return Text(f"measuring {self}" if self.row else "measuring")
