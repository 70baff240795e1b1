"""`halfstep formats`: what happens to these numbers in each format?"""

from __future__ import annotations

from typing import Annotated

import typer

from halfstep.formats import FORMATS, Fate, find_fate

FACTS = (
    *("bits", "storage_bits", "exponent_bits", "mantissa_bits", "has_infinity", "largest", "smallest_normal"),
    *("smallest_subnormal", "spacing_at_1", "decimal_digits"),
)
CONTEXT = {"ignore_unknown_options": True}
"""`formats -3.5`: a number may look like an option."""


def command(
    values: Annotated[
        list[str] | None, typer.Argument(metavar="VALUE", help="Numbers to put into each format.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """What happens to these numbers in each format?

    Without numbers: the range, spacing and digits of every format. With numbers: what each format makes of them.

    Example:

        halfstep formats

        halfstep formats 1e-8 70000 0.1 1.0009765625 -3.5
    """
    fates = {value: [find_fate(value, fmt) for fmt in FORMATS.values()] for value in values or ()}
    if as_json:
        print_json(fates)
    else:
        print_tables(fates)


def print_tables(fates: dict[str, list[Fate]]) -> None:
    from rich.console import Console
    from rich.text import Text

    from halfstep.report.tables import fates_table, formats_table

    console = Console()
    if not fates:
        console.print(formats_table(FORMATS.values()), "")
        console.print(
            "fp8_e4m3 has no infinity: what is too large becomes nan. tf32 lives in 32-bit words.", style="dim"
        )
    for value, rows in fates.items():
        console.print(Text(value, style="bold underline"), fates_table(rows), "", sep="\n")


def print_json(fates: dict[str, list[Fate]]) -> None:
    import json

    answer: object = {value: {fate.format: describe_fate(fate) for fate in rows} for value, rows in fates.items()}
    if not fates:
        answer = {fmt.name: {fact: getattr(fmt, fact) for fact in FACTS} for fmt in FORMATS.values()}
    typer.echo(json.dumps(answer, indent=2, allow_nan=False))


def describe_fate(fate: Fate) -> dict[str, object]:
    import math

    # JSON knows neither inf nor nan.
    result = fate.result if math.isfinite(fate.result) else str(fate.result)
    return {"result": result, "fate": fate.kind, "relative_error": fate.relative_error}
