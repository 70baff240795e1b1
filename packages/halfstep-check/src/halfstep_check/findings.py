"""What a check has to say: a finding, its place, and the edit that would fix it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Severity(StrEnum):
    """error: training breaks or is silently wrong. warning: it will bite. info: worth knowing, never fails a check."""

    ERROR = "error"
    WARNING = "warning"
    INFO = "info"


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Place:
    """A line of a file; environment variables and command lines have a path of their own and line 0."""

    path: str
    line: int = 0
    column: int = 0
    """Counted from 0, as `ast` does."""

    def __str__(self) -> str:
        return f"{self.path}:{self.line}" if self.line else self.path


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Edit:
    """Replace the text between two positions of one file; lines count from 1, columns (in characters) from 0."""

    path: str
    start: tuple[int, int]
    end: tuple[int, int]
    replacement: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One thing that is wrong: the rule it breaks, where, why it matters here, and what to do."""

    rule: str
    message: str
    place: Place
    fix: str = ""
    related: tuple[Place, ...] = ()
    edits: tuple[Edit, ...] = ()
    severity: Severity | None = None
    """Set where this case weighs less than its rule does."""
