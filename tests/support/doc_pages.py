"""What the pages of the docs show: command lines, settings, snippets, each with the page and line it stands on."""

from __future__ import annotations

import itertools
import re
import shlex
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RULES = ROOT / "docs" / "rules"
"""Generated, and full of code that is wrong on purpose: the package's tests check it."""
WRITTEN = (page for page in sorted((ROOT / "docs").rglob("*.md")) if page.parent != RULES)
PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *WRITTEN)
SHELL = ("", "bash", "sh", "console")

FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^ *```", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Shown:
    """A piece of code and where it stands."""

    where: str
    text: str

    def __str__(self) -> str:
        return f"{self.where}: {self.text.splitlines()[0][:60]}"


def blocks(page: Path, *languages: str) -> Iterator[Shown]:
    """The fenced blocks of a page in these languages."""
    text = page.read_text()
    for fence in FENCE.finditer(text):
        if fence[2] in languages:
            line = text.count("\n", 0, fence.start()) + 2
            yield Shown(f"{page.relative_to(ROOT)}:{line}", textwrap.dedent(fence[3]))


def inline(page: Path) -> Iterator[Shown]:
    """What stands between single backticks outside of the blocks."""
    text = FENCE.sub(lambda fence: "\n" * fence[0].count("\n"), page.read_text())
    for code in re.finditer(r"`([^`\n]+)`", text):
        line = text.count("\n", 0, code.start()) + 1
        yield Shown(f"{page.relative_to(ROOT)}:{line}", code[1])


def shell_lines(page: Path) -> Iterator[Shown]:
    """Lines of shell blocks, continued ones joined, and inline code."""
    for block in blocks(page, *SHELL):
        for line in block.text.replace("\\\n", " ").splitlines():
            yield Shown(block.where, line.strip())
    yield from inline(page)


def commands(page: Path) -> Iterator[tuple[Shown, list[str]]]:
    """Every `halfstep COMMAND …` of a page as words, behind any launcher; what a reader fills in is left out."""
    for shown in shell_lines(page):
        if re.search(r"(?<!import)(^|\s)halfstep [a-z]", shown.text):
            yield from ((shown, words) for words in after_halfstep(shown))


def after_halfstep(shown: Shown) -> Iterator[list[str]]:
    """The words behind `halfstep` in each command of a pipe or a list."""
    lexer = shlex.shlex(shown.text, posix=True, punctuation_chars=";|&>")
    lexer.whitespace_split, lexer.commenters = True, "#"
    try:
        words = list(lexer)
    except ValueError as error:
        raise ValueError(f"{shown}: {error}") from error
    for is_operator, group in itertools.groupby(words, key=lambda word: set(word) <= set(";|&>")):
        command = list(group)
        if not is_operator and "halfstep" in command[:-1]:
            yield [word for word in command[command.index("halfstep") + 1 :] if word not in ("...", "…")]
