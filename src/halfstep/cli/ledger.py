"""`halfstep ledger`: what really ran."""

from __future__ import annotations

import json
from typing import Annotated

import typer


def command(
    words: Annotated[
        list[str],
        typer.Argument(metavar="WORKLOAD|CONFIG.yaml|RUN KEY=VALUE", help="What to observe, then settings."),
    ],
    precision: Annotated[str | None, typer.Option(help="auto, fp32, tf32, bf16, fp16, fp8, bf16-true.")] = None,
    data_dir: Annotated[str | None, typer.Option(help="Folder of the data set; default: demo data.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Samples of one micro-batch.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, mps, xpu.")] = None,
    simulate: Annotated[
        bool | None, typer.Option("--simulate", help="Simulate formats that this device lacks.")
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Exit code 1 where anything differs from the plan.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Every row, for scripts.")] = False,
) -> None:
    """What really ran: per module, what its matmuls, convolutions and attention computed in, held against the plan.

    One step is observed, forward and backward: formats, share of the FLOPs, casts, what is kept for backward, gradients
    and optimizer state. What differs from the plan is named with its reason and the fix. Nothing of a run is changed.

    Example:

        halfstep ledger unet --precision bf16

        halfstep ledger runs/unet-20250101-120000 --strict
    """
    from halfstep.run.ledger import as_document
    from halfstep.use.ledger import ledger

    flags = {"precision": precision, "data_dir": data_dir, "batch_size": batch_size, "device": device}
    found = ledger(words[0], flags={**flags, "simulate": simulate}, overrides=words[1:])
    if as_json:
        typer.echo(json.dumps(as_document(found), indent=1))
    else:
        typer.echo("\n\n".join(map(str, found)))
    if strict and any(one.differences for one in found):
        raise typer.Exit(1)
