"""`halfstep compare`: is the accuracy the same, and what does each setting cost?"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from halfstep.cli.options import BatchSize, DataDir, Device, Epochs, Json, MaxSteps, MaybeWords, Simulate, option
from halfstep.errors import ConfigError, Interrupted, counted, suggested

if TYPE_CHECKING:
    from halfstep.use.compare import Comparison
    from halfstep.use.compare_run import Row

UNITS = {"s": 1, "m": 60, "h": 3600}


def command(
    words: MaybeWords = None,
    data_dir: DataDir = None,
    device: Device = None,
    batch_size: BatchSize = None,
    epochs: Epochs = None,
    max_steps: MaxSteps = None,
    precisions: Annotated[str, option("One row each; the first is the baseline.", metavar="A,B,...")] = "fp32,bf16",
    rows: Annotated[
        list[str] | None,
        option("Rows by settings instead; may be repeated.", "--rows", metavar='"NAME: KEY=VALUE ..."'),
    ] = None,
    seeds: Annotated[int | None, option("Paired seeds, one look; default: looks at 5, 8, 12, 20.")] = None,
    margin: Annotated[
        float | None, option("What counts as the same, in the metric's unit; default: from a pilot.")
    ] = None,
    budget: Annotated[str | None, option("Stop after this time: 90s, 30m, 8h.", metavar="30m")] = None,
    price: Annotated[float | None, option("Price of one hour of the device.")] = None,
    at_once: Annotated[int, option("Runs in parallel; gives metrics only, no times.", min=1)] = 1,
    best: Annotated[bool, option("Judge each run's best validation, not its last.", "--best")] = False,
    simulate: Simulate = False,
    out: Annotated[Path | None, option("Folder.", metavar="DIR", show_default="runs/compare-WORKLOAD-TIME")] = None,
    resume: Annotated[Path | None, option("Go on with an interrupted comparison.", metavar="DIR")] = None,
    as_json: Json = False,
) -> None:
    """Is the accuracy the same? Paired seeds, a margin fixed before the first run, and a table of what each row costs.

    The verdict is "same" only where the interval of the difference lies inside the margin; otherwise lower, higher or
    not shown, with the seeds that would decide. An interrupted comparison goes on with --resume.

    Exit code 0: every row is the same; 1: one is lower, higher or not shown.

    Example:

        halfstep compare unet --data-dir data/carvana --precisions fp32,bf16,fp16 --budget 8h

        halfstep compare unet --rows "baseline: precision=fp32" --rows "amp: precision=bf16 train.batch_size=16"

        halfstep compare --resume runs/compare-unet-20250101-120000
    """
    from halfstep.use.compare import Request, new_comparison, open_comparison
    from halfstep.use.equivalence import LOOKS

    if resume is not None:
        if words or out:
            raise ConfigError(f"--resume {resume} knows its own rows and folder", fix="leave the rest out")
        folder, comparison = resume, open_comparison(resume)
    else:
        target, overrides = _target_of(words or [])
        flags = {"data.dir": data_dir, "device": device, "train.batch_size": batch_size,
                 "train.epochs": epochs, "train.max_steps": max_steps}  # fmt: skip
        request = Request(
            target=target,
            overrides=(*overrides, *(f"{key}={value}" for key, value in flags.items() if value is not None)),
            rows=tuple(_asked_rows(rows, precisions, simulate=bool(simulate))),
            looks=LOOKS if seeds is None else (seeds,),
            margin=margin,
            budget_s=None if budget is None else seconds_of(budget),
            at_once=at_once,
            price=price,
            best=best,
        )
        folder, comparison = new_comparison(request, out)
    _run(folder, comparison)
    _show(folder, comparison, as_json=as_json)
    if any(verdict.word != "same" for verdict in comparison.verdicts().values()):
        raise typer.Exit(1)


def _run(folder: Path, comparison: Comparison) -> None:
    from rich.console import Console

    from halfstep.use.compare import run_comparison

    screen, again = Console(stderr=True), suggested("compare", "--resume", folder)
    screen.print(f"interrupted? go on with: {again}", style="dim", soft_wrap=True)
    try:
        run_comparison(
            folder, comparison, lambda line: screen.print(line, highlight=False, markup=False, soft_wrap=True)
        )
    except Interrupted as error:
        raise Interrupted(
            f"comparison stopped after {counted(len(comparison.runs), 'run')}; the run under way is saved as well",
            fix=f"go on with: {again}",
            exit_code=error.exit_code,
        ) from error


def _show(folder: Path, comparison: Comparison, *, as_json: bool) -> None:
    """The table, and beside the runs its curves and numbers."""
    from halfstep.report.comparison_view import draw_comparison, show_comparison
    from halfstep.report.evaluation_view import result_console
    from halfstep.use.compare_table import as_json as comparison_json
    from halfstep.use.compare_table import lines_of, notes_of

    lines, content = lines_of(comparison), json.dumps(comparison_json(comparison), indent=2)
    draw_comparison(lines, comparison.metric, folder / "report" / "curves.png")
    (folder / "report" / "comparison.json").write_text(content + "\n")
    if as_json:
        typer.echo(content)
    else:
        show_comparison(lines, comparison.metric, notes_of(comparison), result_console())


def _target_of(words: list[str]) -> tuple[str, list[str]]:
    if not words or "=" in words[0]:
        raise ConfigError("nothing to compare", fix="name a workload or a file first: halfstep compare unet")
    return words[0], words[1:]


def _asked_rows(rows: list[str] | None, precisions: str, *, simulate: bool) -> list[Row]:
    from halfstep.use.compare_run import Row

    if rows:
        return [_row(text) for text in rows]
    names = [name.strip() for name in precisions.split(",") if name.strip()]
    return [Row.in_precision(name, simulate=simulate) for name in names]


def _row(text: str) -> Row:
    """`amp: precision=bf16 train.batch_size=16`."""
    from halfstep.use.compare_run import Row

    name, colon, settings = text.partition(":")
    words = settings.split()
    odd = next((word for word in words if "=" not in word), None)
    if not colon or not name.strip() or not words or odd is not None:
        raise ConfigError(
            f"--rows {text!r} is not a row" + (f": {odd!r} is not a setting" if odd else ""),
            fix='write a name, a colon and settings: --rows "amp: precision=bf16 train.batch_size=16"',
        )
    return Row(name=name.strip(), overrides=tuple(words))


def seconds_of(text: str) -> float:
    """`90s`, `30m`, `1.5h`."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text.strip().lower())
    if not found or float(found[1]) == 0:
        raise ConfigError(f"--budget {text!r} is not a time", fix="write 90s, 30m or 8h")
    return float(found[1]) * UNITS[found[2] or "s"]
