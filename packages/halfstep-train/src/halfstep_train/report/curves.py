"""Draw charts: `curves.png` of a run, value ranges per module (`replay`), heat maps (`dry-run`).

`curves.png` has four plots: loss, validation metrics, learning rate, and health (the loss scale if there is one, else
the gradient norm). Skipped steps, spikes and rollbacks are marks at the bottom of loss and health.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from halfstep.formats import find_format
from halfstep_train.report.picture_file import BAD, FAINT, GRID, INK, make_figure, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes


Record = Mapping[str, Any]

TRAIN, VALIDATION = "#2f6fde", "#e8710a"
PHASE_COLOURS = (TRAIN, "#12805c", "#8e44ad", "#b7791f")
METRIC_COLOURS = ("#12805c", "#8e44ad", "#0b9ac0", "#b7791f")
"""At most four: more curves in one plot are hard to distinguish."""
NOT_METRICS = {"step", "epoch", "loss", "elapsed_s"}
TRAINING_TWIN = "train_"
"""Prefix of a metric over the epoch's training samples in a validation record."""
FAULT_MARKS = {"skipped": ("|", BAD), "spike": ("x", "#b7791f"), "rollback": ("v", "#8e44ad")}
"""Marker and colour; an overflow is a skipped step too."""
LOG_FROM_POWER = 1.5
"""Use a logarithmic axis if the values span this power of the base (32-fold for 10)."""
SMOOTH_FROM_POINTS = 20
MARKERS_UP_TO_POINTS = 40


@dataclass(frozen=True, kw_only=True, slots=True)
class PlotCurve:
    """One line of a plot; non-finite values are gaps."""

    name: str
    colour: str
    steps: list[float]
    values: list[float]
    is_background: bool = False
    last: float | None = None
    """The value in the legend; None: the last finite one."""

    @property
    def finite(self) -> list[float]:
        return [value for value in self.values if math.isfinite(value)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Quarter:
    """One of the four plots."""

    title: str
    curves: list[PlotCurve]
    faults: dict[str, list[float]] = field(default_factory=dict)
    """Steps to mark, by what happened."""
    log_base: int = 0
    """0: linear. Otherwise logarithmic where the values span enough."""
    note: str = ""
    """Appended to the name of the x axis."""


TITLE_LINE = 64
"""Characters of a legend that fit next to a title."""


def draw_curves(metrics: Sequence[Record], path: Path) -> None:
    """Write the picture of these records to `path`; a plot without records is labelled "no records"."""
    figure = make_figure((11, 6.8))
    last_step = max((float(record["step"]) for record in metrics if "step" in record), default=1.0)
    for axes, quarter in zip(figure.subplots(2, 2).flat, _build_quarters(metrics), strict=True):
        _draw(axes, quarter)
        _style_axes(axes, max(last_step, 1.0), quarter.note)
    with contextlib.suppress(OSError):  # writing the file below reports the reason
        path.parent.mkdir(parents=True, exist_ok=True)
    save_figure(figure, path)


def _build_quarters(metrics: Sequence[Record]) -> list[Quarter]:
    """Build the four plots from the records of a run."""
    train = [record for record in metrics if record.get("kind") == "train"]
    validation = [record for record in metrics if record.get("kind") == "val"]
    faults: dict[str, list[float]] = {}
    for record in metrics:
        if event := record.get("event"):
            # An event is recorded two steps after its step; `bad_step` counts the steps before that one.
            step = float(record["bad_step"] + 1 if "bad_step" in record else record["step"])
            faults.setdefault("skipped" if event == "overflow" else str(event), []).append(step)
    losses = [
        *_add_means(_build_phase_curves(train, "loss", "train, last")),
        _build_curve(validation, "loss", "val, last", VALIDATION),
    ]
    health = Quarter(
        title="Loss scale", curves=[_build_curve(train, "scale", "last", TRAIN)], faults=faults, log_base=2
    )
    if all(value == 1.0 for value in health.curves[0].finite):  # bf16, tf32 and fp32 run at a scale of one
        norms = _build_phase_curves(train, "grad_norm", "last")
        health = Quarter(title="Gradient norm", curves=_add_means(norms), faults=faults, log_base=10)
    return [
        Quarter(title="Loss", curves=losses, faults=faults, log_base=10),
        Quarter(title="Metrics", curves=_build_metric_curves(validation), note="   (faint: on training data)"),
        Quarter(title="Learning rate", curves=_build_phase_curves(train, "lr", "last")),
        health,
    ]


def _build_phase_curves(train: Sequence[Record], key: str, name: str) -> list[PlotCurve]:
    """Build one curve, or one per phase (`loss/critic`)."""
    phases = dict.fromkeys(other for record in train for other in record if other.startswith(f"{key}/"))
    found = [
        _build_curve(train, own, own.removeprefix(f"{key}/"), colour)
        for own, colour in zip(phases, PHASE_COLOURS, strict=False)
    ]
    return found or [_build_curve(train, key, name, TRAIN)]


def _build_curve(records: Sequence[Record], key: str, name: str, colour: str) -> PlotCurve:
    points = [(r["step"], float(r[key])) for r in records if _is_number(r.get(key))]
    values = [value if math.isfinite(value) else math.nan for _, value in points]
    return PlotCurve(name=name, colour=colour, steps=[float(step) for step, _ in points], values=values)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _build_metric_curves(validation: Sequence[Record]) -> list[PlotCurve]:
    """Build the curve of each overall metric (not per class, `iou/cat`), with its training counterpart if recorded."""
    names = dict.fromkeys(name for record in validation for name, value in record.items() if _is_number(value))
    metrics = [n for n in names if n not in NOT_METRICS and "/" not in n and not n.startswith(TRAINING_TWIN)]
    curves = []
    for name, colour in zip(metrics, METRIC_COLOURS, strict=False):
        twin = _build_curve(validation, TRAINING_TWIN + name, name, colour)
        curves += [replace(twin, is_background=True), _build_curve(validation, name, name, colour)]
    return curves


def _add_means(curves: Sequence[PlotCurve]) -> list[PlotCurve]:
    """Add a running mean to each long curve, and draw the curve itself in the background."""
    found = []
    for curve in curves:
        is_long = len(curve.finite) >= SMOOTH_FROM_POINTS
        # The legend shows the last value as recorded, not that of the running mean.
        mean = [replace(curve, values=_compute_running_mean(curve.values), last=curve.finite[-1])] if is_long else []
        found += [replace(curve, is_background=is_long), *mean]
    return found


def _compute_running_mean(values: Sequence[float]) -> list[float]:
    """Average over a window centred on each point: a trailing window would draw a falling loss too high.

    At the start, where losses are steep, the window shrinks to stay centred; at the end it trails.
    """
    half = max(2, len(values) // 40)
    sums, counts = [0.0], [0]
    for value in values:
        sums.append(sums[-1] + (value if math.isfinite(value) else 0.0))
        counts.append(counts[-1] + math.isfinite(value))
    means = []
    for i in range(len(values)):
        reach = min(half, i)
        low, high = i - reach, min(i + reach + 1, len(values))
        count = counts[high] - counts[low]
        means.append((sums[high] - sums[low]) / count if count else math.nan)
    return means


def _draw(axes: Axes, quarter: Quarter) -> None:
    """Draw one plot; use a logarithmic axis if the values span enough."""
    from matplotlib.ticker import LogLocator, NullLocator

    axes.set_title(quarter.title, loc="left", fontsize=11, fontweight="bold", color=INK)
    values = [value for curve in quarter.curves for value in curve.finite]
    if not values:
        axes.text(0.5, 0.5, "no records", transform=axes.transAxes, ha="center", va="center", color=FAINT)
        axes.set_yticks([])
    elif quarter.log_base and min(values) > 0 and max(values) / min(values) >= quarter.log_base**LOG_FROM_POWER:
        axes.set_yscale("log", base=quarter.log_base)
        axes.set_ylabel("logarithmic scale", fontsize=8.5, color=FAINT)
        if quarter.log_base == 10:
            # Powers of ten alone would label a curve from 0.3 to 8 with a single number.
            axes.yaxis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5)))
            axes.yaxis.set_minor_locator(NullLocator())
    for curve in quarter.curves:
        _draw_curve(axes, curve)
    for event, steps in quarter.faults.items():
        marker, colour = FAULT_MARKS.get(event, ("|", BAD))
        axes.plot(
            steps,
            [0.03] * len(steps),
            marker,
            color=colour,
            markersize=9 if marker == "|" else 6,
            transform=axes.get_xaxis_transform(),
            label=f"{event} {len(steps)}",
        )


def _draw_curve(axes: Axes, curve: PlotCurve) -> None:
    """Draw one curve; a background curve is thin, pale and not in the legend."""
    if not curve.finite:
        return
    last = curve.finite[-1] if curve.last is None else curve.last
    is_marked = len(curve.finite) == 1 or len(curve.values) <= MARKERS_UP_TO_POINTS and not curve.is_background
    axes.plot(
        curve.steps,
        curve.values,
        color=curve.colour,
        linewidth=0.9 if curve.is_background else 1.8,
        alpha=0.35 if curve.is_background else 1.0,
        marker="o" if is_marked else "",
        markersize=3.5,
        label="" if curve.is_background else f"{curve.name} {last:{',.0f' if last >= 1000 else '.4g'}}",
    )


def _style_axes(axes: Axes, last_step: float, note: str) -> None:
    """Set limits, ticks, grid and legend of one plot."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axes.set_xlim(0, last_step * 1.03)
    axes.set_xlabel(f"step{note}", fontsize=9, color=FAINT)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda step, _: f"{step:,.0f}"))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:{',.0f' if value >= 1000 else 'g'}}"))
    axes.tick_params(labelsize=8.5, labelcolor=FAINT, color=GRID, which="both")
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GRID)
    if labels := axes.get_legend_handles_labels()[1]:
        # Above the axes, on the title's line: inside, it would cover curves. Long names take more lines, not the title.
        widths = [len(label) + 4 for label in labels]
        columns = len(labels) if sum(widths) <= TITLE_LINE else max(1, TITLE_LINE // max(widths))
        place: dict[str, Any] = {"loc": "lower right", "bbox_to_anchor": (1.0, 1.0), "ncols": columns}
        narrow: dict[str, Any] = {
            "handlelength": 1.0,
            "handletextpad": 0.4,
            "columnspacing": 1.0,
            "borderaxespad": 0.15,
        }
        axes.legend(**place, **narrow, frameon=False, fontsize=8, labelcolor=INK)


COLOURS = {"forward": TRAIN, "backward": VALIDATION}
MOST = 60
"""Modules that fit one page; of more, draw the one at fault and those with the largest values."""

Rows = Mapping[str, Sequence[tuple[str, float, float]]]
"""Name, smallest and largest magnitude of each module, forward and backward."""


def draw_ranges(rows: Rows, format: str, path: Path, *, at: str = "") -> None:
    """Draw a bar from the smallest to the largest magnitude of each module, and the limits of the format.

    `at` is the module at fault.
    """
    fmt = find_format(format if format != "fp8" else "bf16")
    names = choose_modules(rows, at)
    figure = make_figure((9, 1.5 + 0.22 * max(len(names), 4)))
    axes = figure.subplots()
    for k, (direction, own) in enumerate(rows.items()):
        for name, low, high in own:
            if name in names and high > 0:
                left, right = math.log2(low), math.log2(high)
                height = names.index(name) + (k - 0.5) * 0.3
                axes.plot([left, max(right, left + 0.2)], [height, height], color=COLOURS[direction], linewidth=3)
    for direction in rows:
        axes.plot([], [], color=COLOURS[direction], linewidth=3, label=direction)
    ends = {"largest": fmt.largest, "smallest normal": fmt.smallest_normal, "smallest": fmt.smallest_subnormal}
    for limit, value in ends.items():
        axes.axvline(math.log2(value), color=BAD if limit != "smallest normal" else FAINT, linewidth=1, linestyle="--")
        side: Literal["left", "right"] = "left" if limit == "smallest normal" else "right"
        axes.text(math.log2(value), -1.3, f" {fmt.name} {limit} ", color=FAINT, fontsize=7, ha=side, va="bottom")
    axes.set_yticks(range(len(names)), names, fontsize=7, color=INK)
    for label in axes.get_yticklabels():
        if label.get_text() == at:
            label.set(color=BAD, fontweight="bold")
    axes.set_ylim(len(names), -1.2)
    axes.set_xlabel("magnitude, power of two", color=INK)
    axes.grid(axis="x", color=GRID)
    axes.legend(loc="lower right", fontsize=8, framealpha=0.9, edgecolor="none")
    save_figure(figure, path)


def choose_modules(rows: Rows, at: str) -> list[str]:
    """Return as many modules as fit a page, in execution order."""
    largest: dict[str, float] = {}
    for name, _, high in (row for own in rows.values() for row in own):
        largest[name] = max(high, largest.get(name, 0.0))
    # False sorts first: the module at fault is always drawn.
    kept = sorted(largest, key=lambda name: (name != at, -largest[name]))[:MOST]
    return [name for name in largest if name in kept]


def draw_heat_map(cells: Sequence[tuple[str, str, float]], title: str, path: Path) -> None:
    """Draw cells of module, kind and a number from 0 (fits) to 1 (does not fit)."""
    import numpy as np

    modules = list(dict.fromkeys(module for module, *_ in cells))
    kinds = list(dict.fromkeys(kind for _, kind, _ in cells))
    grid = np.full((max(len(modules), 1), max(len(kinds), 1)), np.nan)
    for module, kind, value in cells:
        place = modules.index(module), kinds.index(kind)
        # Several tensors may share a cell: show the worst.
        grid[place] = value if np.isnan(grid[place]) else max(grid[place], value)
    figure = make_figure((2.5 + 1.2 * len(kinds), 1.2 + 0.18 * len(modules)))
    axes = figure.subplots()
    shown = axes.imshow(grid, aspect="auto", cmap="Reds", vmin=0.0, vmax=1.0)
    axes.set_xticks(range(len(kinds)), kinds, color=INK)
    axes.set_yticks(range(len(modules)), modules, fontsize=7, color=INK)
    axes.set_title(title, color=INK)
    figure.colorbar(shown, ax=axes, ticks=[0, 0.5, 1]).ax.set_yticklabels(["fits", "near the end", "does not fit"])
    save_figure(figure, path)
