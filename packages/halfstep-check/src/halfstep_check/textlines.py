"""Lines as parsers count them: `str.splitlines` also breaks at form feeds and other marks, which no parser does."""

from __future__ import annotations

import re

LINE_END = re.compile(r"\r\n|\r|\n")


def lines_of(text: str) -> list[str]:
    """The lines of a text without their ends; never empty."""
    return LINE_END.split(text)


def line_starts(text: str) -> list[int]:
    """Offset of the first character of every line."""
    return [0, *(match.end() for match in LINE_END.finditer(text))]
