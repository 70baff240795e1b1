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
        option(
            "New folder for the results, or the folder of an interrupted run of the same command.",
            metavar="DIR",
            show_default="RUN/predictions",
        ),
    ] = None,
    as_json: Json = False,
    **how: Any,
) -> None:
    """Apply a trained model to files or folders; a model that draws samples needs no input.

    U-Net writes masks with the values and size of the originals, and overlays; classifiers print the most probable
    classes. `halfstep predict RUN --help` also shows the options of the run's workload. Files that cannot be read are
    listed and skipped (exit code 1). No file is overwritten. Ctrl-C finishes the current file; the same command with
    the same --out continues from there.

    Example:

        halfstep predict runs/unet-20250101-120000 photos/ --out predicted

        halfstep predict runs/resnet50 cat.jpg photos/ --top-k 3
    """
    from halfstep_train.run.folder import UNFINISHED

    is_unfinished = out is not None and (out / UNFINISHED).is_file()
    refuse_bad_run(run, None if is_unfinished else out)
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
