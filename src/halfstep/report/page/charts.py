"""Charts as data: the page's script draws them, and a table says the same to those who cannot see them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from halfstep.report.page.read_run import RunRecord

MOST_POINTS = 800
"""A screen shows no more; longer curves are thinned."""
MONITOR = {
    "utilization": "GPU busy, %",
    "power_w": "power, W",
    "clock_mhz": "clock, MHz",
    "temperature_c": "temperature, °C",
    "memory_bytes": "device memory, GB",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    name: str
    points: list[tuple[float, float]]
    dashed: bool = False
    colour: int = 0
    """A number of the palette. One thing has one colour in all charts of a page."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    title: str
    x: str
    series: list[Series] = field(default_factory=list)
    log: bool = False

    def as_data(self) -> dict[str, Any]:
        lines = [{"name": s.name, "dashed": s.dashed, "colour": s.colour, "points": s.points} for s in self.series]
        return {"title": self.title, "x": self.x, "log": self.log, "series": lines}

    @property
    def in_words(self) -> str:
        """For screen readers, and for whoever reads the page as text."""
        said = [f"{s.name or self.title} from {s.points[0][1]:.4g} to {s.points[-1][1]:.4g}" for s in self.series]
        return f"{self.title} over {self.x}: {'; '.join(said)}"


def charts_of(runs: Sequence[RunRecord]) -> list[Chart]:
    """Those with points, in the order in which a reader asks."""
    metric = runs[0].metric
    several, names = len(runs) > 1, _told_apart(runs)

    def lines(kind: str, key: str, label: str) -> Iterable[Series]:
        """A colour for each run; of one run alone, one for training and one for validation."""
        is_validation = label == "validation"
        for number, run in enumerate(runs):
            name = f"{names[number]} {label}".strip() if several else label
            points, colour = _points(run.of_kind(kind), "step", key), number if several else int(is_validation)
            yield Series(name=name, points=points, dashed=is_validation, colour=colour)

    losses = [*lines("train", "loss", "train"), *lines("val", "loss", "validation")]
    scores = [*lines("val", f"train_{metric}", "train"), *lines("val", metric, "validation")]
    charts = [
        Chart(title="loss", x="step", log=True, series=losses),
        Chart(title=metric, x="step", series=scores),
        Chart(title="learning rate", x="step", series=[*lines("train", "lr", "")]),
        Chart(title="gradient norm", x="step", log=True, series=[*lines("train", "grad_norm", "")]),
        Chart(title="loss scale", x="step", log=True, series=_moving(lines("train", "scale", ""))),
        Chart(title="samples/s", x="step", series=[*lines("train", "samples_per_s", "")]),
    ]
    charts += [_monitor_chart(runs, key, title, names if several else [""]) for key, title in MONITOR.items()]
    shown = (Chart(title=c.title, x=c.x, log=c.log, series=[s for s in c.series if s.points]) for c in charts)
    return [chart for chart in shown if chart.series]


def _told_apart(runs: Sequence[RunRecord]) -> list[str]:
    """Names of folders; with their place where two are called the same."""
    names = [run.name for run in runs]
    return [name if names.count(name) == 1 else f"{name} ({number})" for number, name in enumerate(names, 1)]


def _monitor_chart(runs: Sequence[RunRecord], key: str, title: str, names: Sequence[str]) -> Chart:
    scale = 1e-9 if key.endswith("bytes") else 1.0
    lines = [
        Series(
            name=name,
            points=[(x, y * scale) for x, y in _points(run.monitor, "elapsed_s", key)],
            colour=number,
        )
        for number, (run, name) in enumerate(zip(runs, names, strict=True))
    ]
    return Chart(title=title, x="seconds", series=lines)


def _moving(lines: Iterable[Series]) -> list[Series]:
    """A scale that is 1 throughout is that of a format without scaling."""
    return [line for line in lines if any(value != 1 for _, value in line.points)]


def _points(records: Sequence[dict[str, Any]], x: str, y: str) -> list[tuple[float, float]]:
    found = [(float(r[x]), float(r[y])) for r in records if _is_number(r.get(x)) and _is_number(r.get(y))]
    step = math.ceil(len(found) / MOST_POINTS)
    return found if step < 2 else [*found[::step], found[-1]]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
