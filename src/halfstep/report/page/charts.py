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


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    title: str
    x: str
    series: list[Series] = field(default_factory=list)
    log: bool = False

    def as_data(self) -> dict[str, Any]:
        lines = [{"name": s.name, "dashed": s.dashed, "points": s.points} for s in self.series]
        return {"title": self.title, "x": self.x, "log": self.log, "series": lines}

    @property
    def in_words(self) -> str:
        """For screen readers, and for whoever reads the page as text."""
        said = [f"{s.name or self.title} from {s.points[0][1]:.4g} to {s.points[-1][1]:.4g}" for s in self.series]
        return f"{self.title} over {self.x}: {'; '.join(said)}"


def charts_of(runs: Sequence[RunRecord]) -> list[Chart]:
    """Those with points, in the order in which a reader asks."""
    metric = runs[0].metric
    several = len(runs) > 1

    def lines(kind: str, key: str, label: str, *, dashed: bool = False) -> Iterable[Series]:
        for run in runs:
            name = f"{run.name} {label}".strip() if several else label
            yield Series(name=name, points=_points(run.of_kind(kind), "step", key), dashed=dashed)

    losses = [*lines("train", "loss", "train"), *lines("val", "loss", "validation", dashed=True)]
    scores = [*lines("val", metric, "validation"), *lines("val", f"train_{metric}", "train", dashed=True)]
    charts = [
        Chart(title="loss", x="step", log=True, series=losses),
        Chart(title=metric, x="step", series=scores),
        Chart(title="learning rate", x="step", series=[*lines("train", "lr", "")]),
        Chart(title="gradient norm", x="step", log=True, series=[*lines("train", "grad_norm", "")]),
        Chart(title="loss scale", x="step", log=True, series=_moving(lines("train", "scale", ""))),
        Chart(title="samples/s", x="step", series=[*lines("train", "samples_per_s", "")]),
    ]
    charts += [_monitor_chart(runs, key, title, several=several) for key, title in MONITOR.items()]
    shown = (Chart(title=c.title, x=c.x, log=c.log, series=[s for s in c.series if s.points]) for c in charts)
    return [chart for chart in shown if chart.series]


def _monitor_chart(runs: Sequence[RunRecord], key: str, title: str, *, several: bool) -> Chart:
    scale = 1e-9 if key.endswith("bytes") else 1.0
    lines = [
        Series(
            name=run.name if several else "",
            points=[(x, y * scale) for x, y in _points(run.monitor, "elapsed_s", key)],
        )
        for run in runs
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
