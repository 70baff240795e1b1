"""Charts as data: the page's script draws them, and a table says the same to those who cannot see them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from halfstep.report.page.read_run import SAMPLES, RunRecord, per_second

MOST_POINTS = 800
"""A screen shows no more; longer curves are thinned."""
BY_PHASE = {"loss", "grad_norm", "lr"}
"""What is on record for each network, where several train in turn."""
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
    def is_positive(self) -> bool:
        """Whether a logarithmic axis has room for all of it; an adversarial loss may fall below zero."""
        return all(y > 0 for line in self.series for _, y in line.points)

    @property
    def in_words(self) -> str:
        """For screen readers, and for whoever reads the page as text."""
        said = [f"{s.name or self.title} from {s.points[0][1]:.4g} to {s.points[-1][1]:.4g}" for s in self.series]
        return f"{self.title} over {self.x}: {'; '.join(said)}"


def charts_of(runs: Sequence[RunRecord]) -> list[Chart]:
    """Those with points, in the order in which a reader asks."""
    losses = [*_lines(runs, "train", "loss", "train"), *_lines(runs, "val", "loss", "validation")]
    metrics = dict.fromkeys(run.metric for run in runs if run.metric)
    rates = {run.rate for run in runs}
    rate = rates.pop() if len(rates) == 1 else SAMPLES
    charts = [
        Chart(title="loss", x="step", log=True, series=losses),
        *(Chart(title=metric, x="step", series=_scores(runs, metric)) for metric in metrics),
        Chart(title="learning rate", x="step", series=[*_lines(runs, "train", "lr")]),
        Chart(title="gradient norm", x="step", log=True, series=[*_lines(runs, "train", "grad_norm")]),
        Chart(title="loss scale", x="step", log=True, series=_moving(_lines(runs, "train", "scale"))),
        Chart(title=per_second(rate), x="step", series=[*_lines(runs, "train", rate)]),
        *(_monitor_chart(runs, key, title) for key, title in MONITOR.items()),
    ]
    shown = (replace(chart, series=[line for line in chart.series if line.points]) for chart in charts)
    return [replace(chart, log=chart.log and chart.is_positive) for chart in shown if chart.series]


def _scores(runs: Sequence[RunRecord], metric: str) -> list[Series]:
    return [*_lines(runs, "val", f"train_{metric}", "train"), *_lines(runs, "val", metric, "validation")]


def _lines(runs: Sequence[RunRecord], kind: str, key: str, label: str = "") -> Iterable[Series]:
    """A colour for each run, of one run alone for training and validation; where networks train in turn, for each."""
    is_validation = label == "validation"
    for run, name, first in _told_apart(runs):
        in_turn = run.phases if kind == "train" and key in BY_PHASE else []
        first += len(run.phases or [""]) if is_validation and len(runs) == 1 else 0
        for number, phase in enumerate(in_turn or [""]):
            points = _points(run.of_kind(kind), "step", f"{key}/{phase}" if phase else key)
            said = f"{name} {phase or label}".strip()
            yield Series(name=said, points=points, dashed=is_validation, colour=first + number)


def _told_apart(runs: Sequence[RunRecord]) -> Iterable[tuple[RunRecord, str, int]]:
    """With what each is called where there are several, and its first colour: folders' names, numbered where two have
    the same."""
    names, colour = [run.name for run in runs], 0
    for number, run in enumerate(runs, 1):
        name = run.name if names.count(run.name) == 1 else f"{run.name} ({number})"
        yield run, name if len(runs) > 1 else "", colour
        colour += len(run.phases or [""])


def _monitor_chart(runs: Sequence[RunRecord], key: str, title: str) -> Chart:
    scale, found = 1e-9 if key.endswith("bytes") else 1.0, []
    for run, name, colour in _told_apart(runs):
        points = [(x, y * scale) for x, y in _points(run.monitor, "elapsed_s", key)]
        found.append(Series(name=name, points=points, colour=colour))
    return Chart(title=title, x="seconds", series=found)


def _moving(lines: Iterable[Series]) -> list[Series]:
    """A scale that is 1 throughout is that of a format without scaling."""
    return [line for line in lines if any(value != 1 for _, value in line.points)]


def _points(records: Sequence[dict[str, Any]], x: str, y: str) -> list[tuple[float, float]]:
    found = [(float(r[x]), float(r[y])) for r in records if _is_number(r.get(x)) and _is_number(r.get(y))]
    step = math.ceil(len(found) / MOST_POINTS)
    return found if step < 2 else [*found[::step], found[-1]]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
