"""`halfstep dry-run`: predict, per module, whether a format would overflow or lose values."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any

import typer

from halfstep.formats import DryRunTarget
from halfstep_train.cli.options import ArgumentsOrRun, Json, Trust, add_flags, option
from halfstep_train.report.console import dump_json, make_rows_table, open_result_console

if TYPE_CHECKING:
    from halfstep.evidence.dry_run import Judgement


@add_flags("data_dir", "batch_size", "device")
def command(
    arguments: ArgumentsOrRun,
    target: Annotated[DryRunTarget, option("The format.")],
    trust: Trust = False,
    as_json: Json = False,
    **settings: Any,
) -> None:
    """Predict whether a format would work: per module, what would overflow, flush to zero or lose updates.

    Runs a few steps in fp32 on real batches, from a run's weights if a run is given. Shows the headroom in bits and
    whether loss scaling, or the rounding of bf16-true, fixes it. Exit code 1: a module does not fit without a fix.

    Example:

        halfstep dry-run --target fp16 unet --data-dir data/carvana
    """
    from halfstep_train.run.folder import is_run, load_target

    if not is_run(arguments[0]):  # a run keeps the precision that it was trained in
        settings["precision"] = "fp32"
    loaded = load_target(arguments[0], flags=settings, overrides=arguments[1:], trust=trust)
    from halfstep_train.use.observe_step import dry_run

    rows = dry_run(arguments[0], loaded, target, trust=trust)
    if as_json:
        shown = ("module", "kind", "verdict", "lost", "remedy", "headroom_bits")
        found = [{name: getattr(row, name) for name in shown} for row in rows]
        typer.echo(dump_json(found))
    else:
        _show(rows, target)
    if any(row.is_bad and not row.is_saved for row in rows):
        raise typer.Exit(1)


def _show(rows: list[Judgement], target: str) -> None:
    """Print the modules that do not fit, and a summary."""
    console = open_result_console()
    cells = [
        (
            row.module,
            row.kind,
            row.verdict,
            f"{row.headroom_bits:.1f}" if math.isfinite(row.headroom_bits) else "-",
            f"{row.lost:.1%}",
            row.remedy,
        )
        for row in rows
        if row.is_bad
    ]
    if cells:
        console.print(make_rows_table(("module", "kind", "verdict", "headroom (bits)", "lost", "remedy"), cells))
    bad = {row.module for row in rows if row.is_bad and not row.is_saved}
    saved = {row.module for row in rows if row.is_bad} - bad
    more = f"; {len(saved)} fit only with the remedy shown" if saved else ""
    console.print(f"{len(bad)} of {len({row.module for row in rows})} modules do not fit {target}{more}")
