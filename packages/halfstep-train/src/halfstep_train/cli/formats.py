"""`halfstep formats`: show number formats, and what a number becomes in each."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from halfstep.formats import FORMATS, Fate, find_fate
from halfstep_train.report.console import make_columns_table, make_rows_table

CONTEXT = {"ignore_unknown_options": True}
"""`formats -3.5`: a number may look like an option."""


def command(
    values: Annotated[
        list[str] | None, typer.Argument(metavar="VALUE", help="Numbers to convert to each format.")
    ] = None,
) -> None:
    """Show what numbers become in each format.

    Without numbers: the range, spacing and digits of every format.

    Example:

        halfstep formats

        halfstep formats 1e-8 70000 0.1 1.0009765625 -3.5
    """
    fates = {value: [find_fate(value, fmt) for fmt in FORMATS.values()] for value in values or ()}
    console = Console()
    if not fates:
        console.print(make_formats_table(), "")
        console.print(
            "fp8_e4m3 has no infinity: values that are too large become nan. tf32 is stored in 32 bits.", style="dim"
        )
    for value, rows in fates.items():
        console.print(Text(value, style="bold underline"), make_fates_table(rows), "", sep="\n")


def make_formats_table() -> Table:
    """Build the table of number formats."""
    listed = FORMATS.values()
    columns = {
        "format": [f.name for f in listed],
        "bits": [str(f.bits) for f in listed],
        "sign+exp\n+mantissa": [f"1+{f.exponent_bits}+{f.mantissa_bits}" for f in listed],
        "largest": [format_number(f.largest) for f in listed],
        "smallest\nnormal": [format_number(f.smallest_normal) for f in listed],
        "smallest\nsubnormal": [format_number(f.smallest_subnormal) for f in listed],
        "spacing\nat 1": [format_number(f.spacing_at_1) for f in listed],
        "decimal\ndigits": [f"{f.decimal_digits:.1f}" for f in listed],
    }
    return make_columns_table(columns, left=("format",))


def make_fates_table(fates: Iterable[Fate]) -> Table:
    """Build the table of what one number becomes in each format."""
    # Enough digits to tell neighbouring numbers apart: 17 for fp64, 9 for fp32.
    rows = ((f.format, f"{f.result:.{17 if f.format == 'fp64' else 9}g}", f.kind, _format_loss(f)) for f in fates)
    return make_rows_table(("format", "becomes", "fate", "relative error"), rows)


def format_number(value: float) -> str:
    """Write whole numbers below a million in full (65504, 448), others with three digits."""
    return f"{value:.0f}" if 1 <= value < 1e6 else f"{value:.2e}"


def _format_loss(fate: Fate) -> str:
    fmt = FORMATS[fate.format]
    if fate.kind == "overflow":
        return f"the largest is {format_number(fmt.largest)}"
    if fate.kind == "flushed to zero":
        return f"the smallest is {format_number(fmt.smallest_subnormal)}"
    return f"{fate.relative_error:.1e}" if fate.relative_error else ""
