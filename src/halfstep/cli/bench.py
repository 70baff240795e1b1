"""`halfstep bench`: how fast is a training step here, in which precision and mode, and against whom?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from halfstep.cli.bench_request import Asked, Files, prepared, refuse_files, with_workload
from halfstep.cli.options import MaybeWords, option

WHAT, OUTPUT = "What is measured", "Output"
PEER = "plain,lightning,accelerate: the same step elsewhere; plain:graphs names one variant."


def command(
    words: MaybeWords = None,
    batch_size: Annotated[int | None, option("Samples per step.", panel=WHAT, min=1)] = None,
    image_size: Annotated[int | None, option("Image side in pixels.", panel=WHAT, min=1)] = None,
    precisions: Annotated[
        str | None, option("fp32,tf32,bf16,fp16,fp8,auto; default: those this device has.", panel=WHAT)
    ] = None,
    modes: Annotated[
        str | None, option("eager,compile,graph,auto; default: all that run here.", "--modes", "--ways", panel=WHAT)
    ] = None,
    against: Annotated[str | None, option(PEER, panel=WHAT)] = None,
    steps: Annotated[
        int | None, option("Timed steps per row: 100, on a CPU 20; with --explain 10 and 5.", panel=WHAT)
    ] = None,
    device: Annotated[str | None, option("cpu, cuda, cuda:1.", panel=WHAT)] = None,
    explain: Annotated[bool, option("Where the time of a step goes.", "--explain", panel=WHAT)] = False,
    as_json: Annotated[bool, option("Print JSON.", "--json", panel=OUTPUT)] = False,
    picture: Annotated[Path | None, option("Draw a bar chart.", panel=OUTPUT)] = None,
    save: Annotated[Path | None, option("Write the result as JSON.", panel=OUTPUT)] = None,
    force: Annotated[bool, option("Overwrite files.", "--force", panel=OUTPUT)] = False,
) -> None:
    """How fast is a training step here, in which precision and mode, and against whom? No data are needed.

    One row per precision and mode: time, speedup, memory, energy, share of the floor, loss, start.

    Example:

        halfstep bench unet --precisions fp32,bf16 --picture speed.png

        halfstep bench resnet50 --batch-size 64 --modes auto --against plain

        halfstep bench unet --save before.json

        halfstep bench unet --explain
    """
    asked = Asked(
        words=with_workload(words or []),
        flags={"batch_size": batch_size, "image_size": image_size, "device": device},
        precisions=precisions,
        modes=modes,
        against=against,
        steps=steps,
        explain=explain,
    )
    files = Files(picture=picture, save=save, force=force)
    refuse_files(files, explain=explain)
    (run_explain if explain else run_bench)(asked, files, as_json=as_json)


def run_explain(asked: Asked, files: Files, *, as_json: bool) -> None:
    """Take the rows apart."""
    from halfstep.cli.bench_rows import explain_request, show_explanations

    hardware, problem, request = prepared(asked)
    found = explain_request(hardware, problem, request, steps=asked.steps)
    show_explanations(found, files, as_json=as_json)


def run_bench(asked: Asked, files: Files, *, as_json: bool) -> None:
    """Time the rows."""
    from halfstep.cli.bench_rows import measured

    hardware, problem, request = prepared(asked)
    deliver(measured(hardware, problem, request), files, as_json=as_json)


def deliver(found: dict[str, Any], files: Files, *, as_json: bool) -> None:
    """Save, show and draw; exit 1 where nothing could be measured, 130 after Ctrl-C."""
    is_measured = any(row["window_ms"] for row in found["rows"])
    files = files if is_measured else files.without_outputs()
    try:
        if files.save:
            from halfstep.bench.record import save as save_record

            save_record(found, files.save)
    finally:
        show(found, as_json=as_json)
    if files.picture:
        from halfstep.report.bench_view import draw_bench

        draw_bench(found, files.picture)
    if found["stopped"]:
        raise typer.Exit(130)
    if not is_measured:
        raise typer.Exit(1)


def show(found: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        import json

        typer.echo(json.dumps(found, indent=2))
        return
    from halfstep.report.bench_view import show_bench
    from halfstep.report.evaluation_view import result_console

    show_bench(found, result_console(200))
