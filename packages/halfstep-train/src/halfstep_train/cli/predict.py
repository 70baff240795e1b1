"""`halfstep predict`: apply a trained model to files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from halfstep_train.cli.options import Json, RunFolder, add_use_options, option, refuse_bad_run


@add_use_options
def command(
    context: typer.Context,
    run: RunFolder,
    inputs: Annotated[
        list[Path] | None,
        typer.Argument(metavar="INPUT", help="Files or folders; none for a workload without input."),
    ] = None,
    out: Annotated[
        Path | None,
        option("New folder for the results.", metavar="DIR", show_default="RUN/predictions"),
    ] = None,
    as_json: Json = False,
    **how: Any,
) -> None:
    """Apply a trained model to files or folders; a model that draws samples needs no input.

    U-Net writes masks with the values and size of the originals, and overlays; classifiers print the most probable
    classes. `halfstep predict RUN --help` also shows the options of the run's workload. Files that cannot be read are
    listed and skipped (exit code 1). No file is overwritten. Ctrl-C ends the command after the current file.

    Example:

        halfstep predict runs/unet-20250101-120000 photos/ --out predicted

        halfstep predict runs/resnet50 cat.jpg photos/ --top-k 3
    """
    refuse_bad_run(run, out)
    from rich.console import Console

    from halfstep_train.report.console import open_result_console
    from halfstep_train.report.run_report import RunReport, show_predictions
    from halfstep_train.use.predict import predict
    from halfstep_train.workloads.base.using import PredictRequest

    # Progress and warnings go to stderr, so that stdout can be piped.
    report = RunReport(run, console=Console(stderr=True))
    request = PredictRequest(out=out, options=context.obj)
    made = predict(run, inputs or [], report=report, request=request, **how)
    if as_json:
        typer.echo(made.to_json())
    else:
        show_predictions(made, open_result_console())
    if made.failed:
        raise typer.Exit(1)
