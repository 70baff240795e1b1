"""Text and tables on the console: paragraphs, number formats, what becomes of a number, plain columns of text."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from halfstep.formats import FORMATS, Fate, Format

WORD_STYLES = {
    "native": "green",
    "emulated": "yellow",
    "missing": "dim",
    "exact": "green",
    "rounded": "cyan",
    "subnormal": "yellow",
    "flushed to zero": "bold red",
    "overflow": "bold red",
    "yes": "green",
    "no": "dim",
}
"""Words that carry their own colour wherever they stand."""


def print_text(console: Console, text: Text) -> None:
    """Print a paragraph: on a terminal broken between words, elsewhere as one line that a search finds whole.

    A path longer than the terminal is left whole, so that it can be copied.
    """
    if console.is_terminal:
        text = text.copy()
        text.plain = "\n".join(_broken(line, console.width) for line in text.plain.split("\n"))
    console.print(text, soft_wrap=True)


def _broken(line: str, width: int) -> str:
    # Not rich's wrapping, which folds or crops a word longer than the terminal.
    indent = " " * (len(line) - len(line.lstrip()))
    return textwrap.fill(line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def plain_table(*titles: str) -> Table:
    """Our style: no frame but a rule under the titles, readable at 80 columns. The first column stands out."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for index, title in enumerate(titles):
        table.add_column(title, style="bold" if index == 0 else "", no_wrap=index == 0)
    return table


def columns_table(columns: Mapping[str, Sequence[str]], *, left: Iterable[str] = ()) -> Table:
    """Cells column by column; numbers stand right, the columns named in `left` do not."""
    table = plain_table(*columns)
    for column, title in zip(table.columns, columns, strict=True):
        column.justify, column.no_wrap = "left" if title in left else "right", True
    for row in zip(*columns.values(), strict=True):
        table.add_row(*(coloured(cell) for cell in row))
    return table


def pairs_table(pairs: Iterable[tuple[str, str]]) -> Table:
    """Names with their values, no titles."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in pairs:
        table.add_row(name, Text(value))
    return table


def rows_table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Rows of text; words with a colour of their own get it."""
    table = plain_table(*titles)
    for row in rows:
        table.add_row(*(coloured(cell) for cell in row))
    return table


def coloured(word: str) -> Text:
    return Text(word, style=WORD_STYLES.get(word, ""))


def formats_table(formats: Iterable[Format]) -> Table:
    """The table of number formats."""
    listed = tuple(formats)
    columns = {
        "format": [f.name for f in listed],
        "bits": [str(f.bits) for f in listed],
        "sign+exp\n+mantissa": [f"1+{f.exponent_bits}+{f.mantissa_bits}" for f in listed],
        "largest": [number(f.largest) for f in listed],
        "smallest\nnormal": [number(f.smallest_normal) for f in listed],
        "smallest\nsubnormal": [number(f.smallest_subnormal) for f in listed],
        "spacing\nat 1": [number(f.spacing_at_1) for f in listed],
        "decimal\ndigits": [f"{f.decimal_digits:.1f}" for f in listed],
    }
    return columns_table(columns, left=("format",))


def fates_table(fates: Iterable[Fate]) -> Table:
    """What each format makes of one number."""
    digits = {"fp64": 17}
    rows = ((f.format, f"{f.result:.{digits.get(f.format, 9)}g}", f.kind, _loss(f)) for f in fates)
    return rows_table(("format", "becomes", "fate", "relative error"), rows)


def number(value: float) -> str:
    """Short where that is exact (65504, 448), three digits otherwise."""
    return f"{value:.0f}" if 1 <= value < 1e6 else f"{value:.2e}"


def _loss(fate: Fate) -> str:
    fmt = FORMATS[fate.format]
    if fate.kind == "overflow":
        return f"the largest is {number(fmt.largest)}"
    if fate.kind == "flushed to zero":
        return f"the smallest is {number(fmt.smallest_subnormal)}"
    return f"{fate.relative_error:.1e}" if fate.relative_error else ""
