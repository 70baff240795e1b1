"""Three exercises in mixed precision, each under two minutes on a laptop, with claims that the run confirms or not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """A statement, and whether this run shows it."""

    text: str
    holds: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Story:
    """The result of an exercise: a table, claims and comments."""

    title: str
    titles: Sequence[str]
    rows: Sequence[Sequence[str]]
    claims: Sequence[Claim]
    comments: Sequence[str] = ()
    """Comments on the result."""
    picture: Path | None = None

    @property
    def holds(self) -> bool:
        return all(claim.holds for claim in self.claims)
