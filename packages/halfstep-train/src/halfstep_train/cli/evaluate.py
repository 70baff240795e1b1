"""`halfstep evaluate`: score a trained model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from halfstep_train.cli.options import Json, RunFolder, add_use_options, option, refuse_bad_run


@add_use_options
def command(
    context: typer.Context,
    run: RunFolder,
    data: Annotated[
        Path | None,
        option("Other data; default: the run's validation split.", "--data", "--data-dir", metavar="DIR"),
    ] = None,
    batch_size: Annotated[int | None, option("Samples per batch; default: the run's.", min=1)] = None,
    out: Annotated[
        Path | None, option("New folder for images.", metavar="DIR", show_default="RUN/report/evaluation")
    ] = None,
    as_json: Json = False,
    **how: Any,
) -> None:
    """Score a trained model: overall and per-class scores, and images of its mistakes.

    Without --data the scores are those that training computed for this checkpoint. Other data are evaluated completely,
    or on their own validation split if they have one. No file is overwritten.

    `halfstep evaluate RUN --help` also shows the options of the run's workload.

    Example:

        halfstep evaluate runs/unet-20250101-120000

        halfstep evaluate runs/resnet50 --data data/new_photos --checkpoint last --json
    """
    refuse_bad_run(run, out, data)
    from rich.console import Console

    from halfstep_train.report.console import open_result_console
    from halfstep_train.report.run_report import RunReport, show_evaluation
    from halfstep_train.use.evaluate import evaluate

    # Progress and warnings go to stderr, so that stdout can be piped.
    report = RunReport(run, console=Console(stderr=True))
    options = context.obj  # of the run's workload
    found = evaluate(run, report=report, data=data, batch_size=batch_size, options=options, out=out, **how)
    if as_json:
        typer.echo(found.to_json())
    else:
        show_evaluation(found, open_result_console())
