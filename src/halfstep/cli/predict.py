"""`halfstep predict`: use it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from halfstep.cli.options import Checkpoint, Json, RunFolder, Trust, UsedDevice, UsedPrecision, option


def command(
    context: typer.Context,
    run: RunFolder,
    inputs: Annotated[
        list[Path] | None,
        typer.Argument(metavar="INPUT", help="Files, or folders of them; none for a workload that needs none."),
    ] = None,
    out: Annotated[
        Path | None,
        option(
            "New folder for what is written, or that of the same command interrupted.",
            metavar="DIR",
            show_default="RUN/predictions",
        ),
    ] = None,
    checkpoint: Checkpoint = "best",
    device: UsedDevice = None,
    precision: UsedPrecision = None,
    csv: Annotated[Path | None, option("Write the table to a new file as well.", metavar="FILE")] = None,
    trust: Trust = False,
    as_json: Json = False,
) -> None:
    """Use a trained model on files or folders; one that draws samples needs no input.

    U-Net writes masks with the values and size of the originals, and overlays; classifiers give the most probable
    classes. `halfstep predict RUN --help` shows the options of the run's workload, too. Files that cannot be read are
    named and left out (exit code 1). Nothing is overwritten. Ctrl-C finishes the file in progress; the same command
    with the same --out continues from there.

    Example:

        halfstep predict runs/unet-20250101-120000 photos/ --out predicted

        halfstep predict runs/resnet50 cat.jpg photos/ --top-k 3 --csv answers.csv
    """
    from rich.console import Console

    from halfstep.report.results import open_result_console, refuse_existing, show_predictions, write_csv
    from halfstep.report.run_report import RunReport
    from halfstep.use.predict import predict
    from halfstep.workloads.base.using import Wishes

    if csv:
        refuse_existing(csv)
    # Progress and warnings go to stderr: what is printed can be piped.
    report = RunReport(run, console=Console(stderr=True))
    wishes = Wishes(out=out, options=context.obj)
    made = predict(
        run,
        inputs or [],
        report=report,
        wishes=wishes,
        checkpoint=checkpoint,
        device=device,
        precision=precision,
        trust=trust,
    )
    if csv:
        write_csv(made, csv)
    if as_json:
        typer.echo(made.to_json())
    else:
        show_predictions(made, open_result_console())
    if made.failed:
        raise typer.Exit(1)
