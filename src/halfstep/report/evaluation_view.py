"""How good a model is: the facts, the scores of the whole, and of every class; on the console and as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.text import Text

from halfstep.errors import format_count, make_printable
from halfstep.report.tables import columns_table, pairs_table, print_text

Cell = str | int | float | None
SHOWN_CLASSES = 40
"""More rows than this are no longer read; the worst ones are."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """The outcome of one evaluation: plain values only."""

    run: str
    workload: str
    checkpoint: str
    weights: str
    data: str
    samples: int
    precision: str
    simulated: bool
    device: str
    metrics: Mapping[str, float]
    """As validation computes them in training."""
    scoring: str = ""
    """What the metrics' names do not say of how they are computed."""
    scored_at: str = ""
    """The size at which masks were compared."""
    classes: tuple[Mapping[str, Cell], ...] = ()
    """One row per class; every row has the same columns, the first of which names the class."""
    ranking: str = ""
    """The column by which classes are good or bad."""
    hint: str = ""
    """What the scores say beyond their numbers, where they do."""
    files: tuple[str, ...] = ()
    seconds: float = 0.0

    def to_json(self) -> str:
        """Everything."""
        return json_text(asdict(self))


def result_console(pipe_width: int = 1000) -> Console:
    """Standard output; a file or a pipe has no width, and rich would squeeze everything into 80 columns."""
    console = Console()
    return console if console.is_terminal else Console(width=pipe_width)


def json_text(value: Any) -> str:
    """Valid JSON: a number that is not finite becomes null, a byte of a file name that is not UTF-8 `\\xe9`."""
    return json.dumps(_plain(value), indent=2, ensure_ascii=False, allow_nan=False)


def show_evaluation(found: Evaluation, console: Console) -> None:
    """Facts, scores, classes, files."""
    facts = {
        "run": found.run,
        "checkpoint": f"{found.checkpoint}, weights {found.weights}",
        "data": f"{found.data}, {format_count(found.samples, 'sample')}",
        "precision": f"{found.precision}{' (simulated)' if found.simulated else ''} on {found.device}",
        "scores": found.scoring,
        "scored at": found.scored_at,
    }
    console.print(pairs_table(pair for pair in facts.items() if pair[1]), soft_wrap=True)
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


def _show_classes(found: Evaluation, console: Console) -> None:
    rows = list(found.classes)
    if len(rows) > SHOWN_CLASSES:
        rows = sorted(rows, key=lambda row: _rank(row[found.ranking]))[:SHOWN_CLASSES]
        console.print(Text(f"The {len(rows)} worst of {len(found.classes)} classes by {found.ranking}:"))
    columns = {title: [shown(row[title]) for row in rows] for title in rows[0]}
    texts = [title for title in columns if any(isinstance(row[title], str) for row in rows)]
    console.print(columns_table(columns, left=texts), soft_wrap=True)


def _rank(value: Cell) -> float:
    return float(value) if isinstance(value, int | float) else math.inf


def shown(value: Cell) -> str:
    """A cell as text: four digits, thousands apart, a dash for what there is not."""
    if value is None:
        return "-"
    return f"{value:.4f}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else value


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {make_printable(str(name)): _plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, str):
        return make_printable(value)
    return None if isinstance(value, float) and not math.isfinite(value) else value
