"""`halfstep dry-run`: would this format hold?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from halfstep.cli.options import BatchSize, DataDir, Device, Json, Trust, WordsOrRun, option

if TYPE_CHECKING:
    from halfstep.evidence.dry_run import Judgement


def command(
    words: WordsOrRun,
    target: Annotated[str, option("The format.", metavar="fp16|bf16-true|fp8")],
    data_dir: DataDir = None,
    batch_size: BatchSize = None,
    batches: Annotated[int, option("Batches to look at.", min=1)] = 2,
    device: Device = None,
    picture: Annotated[Path | None, option("Draw a heat map, modules × kind.", metavar="FILE.png")] = None,
    every: Annotated[bool, option("Show modules that fit, too.", "--all")] = False,
    trust: Trust = False,
    as_json: Json = False,
) -> None:
    """Would this format hold: per module what would overflow, flush to zero or lose updates, before a GPU is rented.

    Steps run in fp32 on real batches, from a run's weights where a run is named. Shows the headroom in bits and whether
    loss scaling, or the rounding of bf16-true, saves it. Exit code 1 where a module does not fit and nothing saves it.

    Example:

        halfstep dry-run --target fp16 unet --data-dir data/carvana --picture heat.png
    """
    from halfstep.use.observe_step import dry_run

    flags = {"data_dir": data_dir, "batch_size": batch_size, "device": device}
    rows = dry_run(words[0], target, num_batches=batches, flags=flags, overrides=words[1:], trust=trust)
    if picture is not None:
        from halfstep.report.curves import draw_heat_map

        draw_heat_map([(row.module, row.kind, _compute_badness(row)) for row in rows], f"dry run: {target}", picture)
    if as_json:
        typer.echo(json.dumps([_convert_row(row) for row in rows], indent=1))
    else:
        _show(rows, target, every=every)
    if any(row.is_bad and not row.is_saved for row in rows):
        raise typer.Exit(1)


def _compute_badness(row: Judgement) -> float:
    """From 0, far from the format's ends, to 1, past them."""
    edge = max(0.0, 1.0 - row.headroom_bits / 8) if row.headroom_bits and row.headroom_bits > 0 else 0.0
    return 1.0 if row.is_bad else max(min(row.lost * 10, 0.9), min(edge, 0.9))


def _convert_row(row: Judgement) -> dict[str, object]:
    import math

    headroom = row.headroom_bits if math.isfinite(row.headroom_bits) else None
    return {
        "module": row.module, "kind": row.kind, "verdict": row.verdict, "headroom_bits": headroom, "lost": row.lost,
        "remedy": row.remedy,
    }  # fmt: skip


def _show(rows: list[Judgement], target: str, *, every: bool) -> None:
    from halfstep.report.results import open_result_console
    from halfstep.report.tables import rows_table

    console = open_result_console()
    shown = [row for row in rows if every or row.is_bad]
    cells = [
        (row.module, row.kind, row.verdict, _format_bits(row.headroom_bits), f"{row.lost:.1%}", row.remedy)
        for row in shown
    ]
    if cells:
        console.print(rows_table(("module", "kind", "verdict", "headroom (bits)", "lost", "remedy"), cells))
    bad = {row.module for row in rows if row.is_bad and not row.is_saved}
    saved = {row.module for row in rows if row.is_bad} - bad
    more = f"; {len(saved)} would not fit by themselves and are saved" if saved else ""
    console.print(f"{len(bad)} of {len({row.module for row in rows})} modules do not fit {target}{more}")


def _format_bits(headroom: float) -> str:
    return f"{headroom:.1f}" if abs(headroom) != float("inf") else "-"
