"""A finding, its place, the edit that would fix it, and the comments that silence it."""

from __future__ import annotations

import re
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
    unless_accelerate_shards: bool = False
    """Dropped where an accelerate config of the run selects FSDP or DeepSpeed with mixed precision."""


LINE_END = re.compile(r"\r\n|\r|\n")
"""Line ends as parsers count them: `str.splitlines` also breaks at form feeds and other marks."""


def split_lines(text: str) -> list[str]:
    """Return the lines of a text without their ends; never empty."""
    return LINE_END.split(text)


def find_line_starts(text: str) -> list[int]:
    """Return offset of the first character of every line."""
    return [0, *(match.end() for match in LINE_END.finditer(text))]


COMMENT = re.compile(r"#\s*halfstep:\s*ignore(?:\[([\w\s,-]*)\])?")


class Ignores:
    """`# halfstep: ignore[RULE]` comments of one file; one alone on its line silences the line below."""

    def __init__(self, text: str) -> None:
        self.rules: dict[int, set[str]] = {}
        """Names of silenced rules, by the line they are silenced on."""
        self.written: list[tuple[int, str]] = []
        """Every name with the line of its comment."""
        if "halfstep:" not in text:
            return
        for number, line in enumerate(split_lines(text), start=1):
            if comment := COMMENT.search(line):
                names = {name.strip() for name in (comment.group(1) or "*").split(",")}
                self.written += [(number, name) for name in sorted(names)]
                stands_alone = line.lstrip().startswith("#")
                self.rules.setdefault(number + 1 if stands_alone else number, set()).update(names)

    def silence(self, finding: Finding) -> bool:
        names = self.rules.get(finding.place.line, set())
        return finding.rule in names or "*" in names
