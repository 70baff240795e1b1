"""Console output that all commands share: paragraphs, tables, the console for results, JSON text."""

from __future__ import annotations

import json
import logging
import math
import textwrap
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from halfstep.errors import make_printable


@contextmanager
def silence() -> Iterator[None]:
    """Suppress other packages' warnings and log lines below errors."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)


def print_text(console: Console, text: Text) -> None:
    """Print a paragraph: wrapped on a terminal, elsewhere as one line, so that it can be searched.

    A path longer than the terminal is left whole, so that it can be copied.
    """
    if console.is_terminal:
        text = text.copy()
        text.plain = "\n".join(break_line(line, console.width) for line in text.plain.split("\n"))
    console.print(text, soft_wrap=True)


def break_line(line: str, width: int) -> str:
    """Break a line between words; the next lines get its indentation."""
    # Not rich's wrapping, which folds or crops a word longer than the terminal.
    indent = " " * (len(line) - len(line.lstrip()))
    return textwrap.fill(line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def make_plain_table(*titles: str) -> Table:
    """Return an empty table in our style: a rule under the titles, no frame, the first column bold."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for index, title in enumerate(titles):
        table.add_column(title, style="bold" if index == 0 else "", no_wrap=index == 0)
    return table


def make_columns_table(columns: Mapping[str, Sequence[str]], *, left: Iterable[str] = ()) -> Table:
    """Make a table from columns of cells, right-aligned except for those in `left`."""
    table = make_rows_table(tuple(columns), zip(*columns.values(), strict=True))
    for column, title in zip(table.columns, columns, strict=True):
        column.justify, column.no_wrap = "left" if title in left else "right", True
    return table


GAP = 2
"""Spaces between two columns."""


def split_columns(
    columns: Mapping[str, Sequence[str]], width: int, *, names: Sequence[str]
) -> list[dict[str, Sequence[str]]]:
    """Split the columns into as few tables as fit the width, each with the columns that name its rows."""
    widths = {title: max(map(len, (*title.split("\n"), *cells))) + GAP for title, cells in columns.items()}
    named = {title: columns[title] for title in names}
    tables: list[dict[str, Sequence[str]]] = [dict(named)]
    for title in columns:
        if title in names:
            continue
        # Start a new table when the next column would exceed the width, unless the table is empty.
        if len(tables[-1]) > len(names) and sum(widths[one] for one in (*tables[-1], title)) - GAP > width:
            tables.append(dict(named))
        tables[-1][title] = columns[title]
    return tables


def make_pairs_table(pairs: Iterable[tuple[str, str]]) -> Table:
    """Make a table of names and values without titles."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in pairs:
        table.add_row(make_printable(name), Text(make_printable(value)))
    return table


def make_rows_table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Make a table from rows of text."""
    table = make_plain_table(*titles)
    for row in rows:
        table.add_row(*(Text(make_printable(cell)) for cell in row))
    return table


def open_result_console(pipe_width: int = 1000) -> Console:
    """Return a console for stdout; give files and pipes a large width, which rich would limit to 80 columns."""
    console = Console()
    return console if console.is_terminal else Console(width=pipe_width)


def dump_json(value: Any) -> str:
    """Return valid JSON: non-finite numbers become null, bytes of a file name that are not UTF-8 become `\\xe9`."""
    return json.dumps(_make_plain(value), indent=2, ensure_ascii=False, allow_nan=False)


def _make_plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {make_printable(str(name)): _make_plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_make_plain(inner) for inner in value]
    if isinstance(value, str):
        return make_printable(value)
    return None if isinstance(value, float) and not math.isfinite(value) else value
