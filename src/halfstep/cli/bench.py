"""`halfstep bench`: how fast is a training step here, in which precision and mode, and against whom?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from halfstep.cli.bench_request import Asked, Files, prepared, refuse_files, with_workload
from halfstep.cli.options import MaybeWords, Strict, option

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
    strict: Strict = None,
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
        flags={"batch_size": batch_size, "image_size": image_size, "device": device, "strict": strict},
        precisions=precisions,
        modes=modes,
        against=against,
        steps=steps,
        explain=explain,
    )
    files = Files(picture=picture, save=save, force=force)
    refuse_files(files, explain=explain)
    found = prepared(asked)
    from halfstep.cli.bench_rows import take_rows_apart, time_rows

    if explain:
        take_rows_apart(*found, files, steps=steps, as_json=as_json)
    else:
        time_rows(*found, files, as_json=as_json)
