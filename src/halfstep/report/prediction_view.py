"""What a model says about files: a table, CSV and JSON, and which files could not be read."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from halfstep.errors import ConfigError, format_count, make_printable
from halfstep.report.evaluation_view import Cell, json_text
from halfstep.report.tables import columns_table

SHOWN_FILES = 40
"""Of results that lie in a folder anyway."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What was found in one file, in three forms; each has the same columns for every file of a call."""

    file: str
    found: Mapping[str, Any]
    """For JSON."""
    cells: Mapping[str, Cell] = field(default_factory=dict)
    """For CSV; empty: what was found."""
    brief: Mapping[str, str] = field(default_factory=dict)
    """For the console; empty: what was found."""

    def __post_init__(self) -> None:
        plain = {name: value if isinstance(value, str | float) else str(value) for name, value in self.found.items()}
        object.__setattr__(self, "cells", self.cells or plain)
        object.__setattr__(self, "brief", self.brief or {name: str(value) for name, value in plain.items()})


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """A file that could not be used."""

    file: str
    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Predictions:
    """The outcome of one call: plain values only."""

    run: str
    workload: str
    checkpoint: str
    weights: str
    precision: str
    simulated: bool
    device: str
    answers: tuple[Answer, ...]
    failed: tuple[Failure, ...] = ()
    out: str | None = None
    seconds: float = 0.0

    def to_json(self) -> str:
        """Everything, without the cells."""
        whole = asdict(self)
        whole["predictions"] = [{"file": answer.file, **answer.found} for answer in self.answers]
        return json_text({name: value for name, value in whole.items() if name != "answers"})


def show_predictions(made: Predictions, console: Console) -> None:
    """A row per file, then where the results are and what was left out."""
    answers = made.answers[:SHOWN_FILES] if made.out else made.answers
    rows = [_printable({"file": answer.file, **answer.brief}) for answer in answers]
    if rows:
        table = columns_table({title: [row[title] for row in rows] for title in rows[0]}, left=rows[0])
        for column in table.columns:
            column.no_wrap, column.overflow = False, "fold"  # the end of a path is what tells it apart
        console.print(table)
    if len(answers) < len(made.answers):
        console.print(Text(f"and {len(made.answers) - len(answers):,} more", style="dim"))
    how = f"{made.precision}{' (simulated)' if made.simulated else ''} on {made.device}"
    where = f", written to {made.out}" if made.out else ""
    console.print(
        Text(f"\n{format_count(len(made.answers), 'file')} with {made.checkpoint} in {how}{where}"), soft_wrap=True
    )
    if made.failed:
        console.print(Text(f"{len(made.failed):,} could not be used", style="yellow"))


def _printable(row: Mapping[str, Any]) -> dict[str, Any]:
    return {
        make_printable(name): make_printable(value) if isinstance(value, str) else value for name, value in row.items()
    }


def refuse_existing(path: Path) -> None:
    """Say so before the work, not after it."""
    if path.exists():
        raise ConfigError(f"--csv {path} exists already", why="nothing is overwritten", fix="choose another name")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"no folder {path.parent} for --csv {path}", fix="make it first, or choose another name")


def write_csv(made: Predictions, path: Path) -> None:
    """One line per file, with a title line; numbers in full."""
    rows = [_printable({"file": answer.file, **answer.cells}) for answer in made.answers]
    try:
        with path.open("x", newline="", encoding="utf-8") as file:
            table = csv.DictWriter(file, fieldnames=list(rows[0]) if rows else ["file"])
            table.writeheader()
            table.writerows(rows)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}", fix="choose another place with --csv") from error
