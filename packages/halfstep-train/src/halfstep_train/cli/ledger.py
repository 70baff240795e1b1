"""`halfstep ledger`: record the formats that a step really computes in."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from halfstep_train.cli.options import ArgumentsOrRun, Json, Trust, add_flags, option


@add_flags("precision", "data_dir", "batch_size", "device", "simulate")
def command(
    arguments: ArgumentsOrRun,
    strict: Annotated[bool, option("Exit with 1 if anything differs from the plan.", "--strict")] = False,
    trust: Trust = False,
    as_json: Json = False,
    **settings: Any,
) -> None:
    """Show which format each module's matmuls, convolutions and attention really computed in, compared with the plan.

    Observes one step, forward and backward: formats, share of the FLOPs, casts, tensors saved for backward, gradients
    and optimizer state. Differences from the plan are listed with reason and fix. A run is not changed.

    Example:

        halfstep ledger unet --precision bf16

        halfstep ledger runs/unet-20250101-120000 --strict
    """
    from halfstep_train.run.folder import load_target

    loaded = load_target(arguments[0], flags=settings, overrides=arguments[1:], trust=trust)
    from halfstep_train.run.evidence import to_document
    from halfstep_train.use.observe_step import record_ledger

    found = record_ledger(arguments[0], loaded, trust=trust)
    if as_json:
        typer.echo(json.dumps(to_document(found), indent=1))
    else:
        typer.echo("\n\n".join(map(str, found)))
    if strict and any(one.findings for one in found):
        raise typer.Exit(1)
