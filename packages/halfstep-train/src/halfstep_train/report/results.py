"""Show results of `evaluate` and `predict`: on the console, as JSON and as CSV."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console
from rich.text import Text

from halfstep.errors import format_count, make_printable
from halfstep_train.report.console import dump_json, make_columns_table, make_pairs_table, print_text

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

    def to_json(self) -> str:
        """Return all fields as JSON."""
        return dump_json(asdict(self))


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
    rows = [_make_printable({"file": answer.file, **answer.brief}) for answer in answers]
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


def _make_printable(row: Mapping[str, Any]) -> dict[str, Any]:
    return {
        make_printable(name): make_printable(value) if isinstance(value, str) else value for name, value in row.items()
    }
