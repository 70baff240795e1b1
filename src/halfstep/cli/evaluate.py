"""`halfstep evaluate`: how good is it?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from halfstep.cli.options import Checkpoint, Json, RunFolder, Trust, UsedDevice, UsedPrecision, option


def command(
    context: typer.Context,
    run: RunFolder,
    data: Annotated[
        Path | None,
        option("Other data; default: the validation part of the run's own.", "--data", "--data-dir", metavar="DIR"),
    ] = None,
    checkpoint: Checkpoint = "best",
    device: UsedDevice = None,
    precision: UsedPrecision = None,
    batch_size: Annotated[int | None, option("Default: the run's.", min=1)] = None,
    out: Annotated[
        Path | None, option("New folder for pictures.", metavar="DIR", show_default="RUN/report/evaluation")
    ] = None,
    trust: Trust = False,
    as_json: Json = False,
) -> None:
    """How good is it: overall and per-class scores, and pictures of what went wrong.

    Without --data these are the numbers that training saw when it wrote the checkpoint. Other data are
    evaluated whole, or by their own validation part where they have one. Nothing is overwritten.

    `halfstep evaluate RUN --help` shows the options of the run's workload, too.

    Example:

        halfstep evaluate runs/unet-20250101-120000

        halfstep evaluate runs/resnet50 --data data/new_photos --checkpoint last --json
    """
    from rich.console import Console

    from halfstep.report.results import open_result_console, show_evaluation
    from halfstep.report.run_report import RunReport
    from halfstep.use.evaluate import evaluate

    # Progress and warnings go to stderr: what is printed can be piped.
    report = RunReport(run, console=Console(stderr=True))
    found = evaluate(
        run,
        report=report,
        data=data,
        checkpoint=checkpoint,
        device=device,
        precision=precision,
        batch_size=batch_size,
        options=context.obj,
        out=out,
        trust=trust,
    )
    if as_json:
        typer.echo(found.to_json())
    else:
        show_evaluation(found, open_result_console())
