"""`halfstep compare`: is the accuracy the same, and what does each setting cost?"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from halfstep.errors import ConfigError, Interrupted, counted, suggested

if TYPE_CHECKING:
    from halfstep.use.compare_run import Row

UNITS = {"s": 1, "m": 60, "h": 3600}


def command(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="WORKLOAD|CONFIG.yaml KEY=VALUE", help="What to train, then settings of all rows."),
    ] = None,
    data_dir: Annotated[str | None, typer.Option(help="Folder of the data set.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, mps, xpu.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Samples of one micro-batch.")] = None,
    epochs: Annotated[int | None, typer.Option(help="Passes over the training set.")] = None,
    max_steps: Annotated[int | None, typer.Option(help="Steps at most; 0: no limit.")] = None,
    precisions: Annotated[
        str, typer.Option(metavar="A,B,...", help="One row each; the first is the baseline.")
    ] = "fp32,bf16",
    rows: Annotated[
        list[str] | None,
        typer.Option("--rows", metavar='"NAME: KEY=VALUE ..."', help="Rows by settings instead; may be repeated."),
    ] = None,
    seeds: Annotated[int | None, typer.Option(help="Paired seeds, one look; default: looks at 5, 8, 12, 20.")] = None,
    margin: Annotated[
        float | None, typer.Option(help="What counts as the same, in the metric's unit; default: from a pilot.")
    ] = None,
    budget: Annotated[str | None, typer.Option(metavar="30m", help="Stop after this time: 90s, 30m, 8h.")] = None,
    price: Annotated[float | None, typer.Option(help="Price of one hour of the device.")] = None,
    at_once: Annotated[int, typer.Option(min=1, help="Runs in parallel; gives metrics only, no times.")] = 1,
    best: Annotated[bool, typer.Option("--best", help="Judge each run's best validation, not its last.")] = False,
    simulate: Annotated[bool, typer.Option("--simulate", help="Simulate formats that this device lacks.")] = False,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder.", show_default="runs/compare-WORKLOAD-TIME")
    ] = None,
    resume: Annotated[Path | None, typer.Option(metavar="DIR", help="Go on with an interrupted comparison.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON alone.")] = False,
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
    from rich.console import Console

    from halfstep.report.comparison_view import draw_comparison, show_comparison
    from halfstep.report.evaluation_view import result_console
    from halfstep.use.compare import Request, new_comparison, open_comparison, run_comparison
    from halfstep.use.compare_table import as_json as comparison_json
    from halfstep.use.compare_table import lines_of, notes_of
    from halfstep.use.equivalence import LOOKS

    if resume is not None:
        if words or out:
            raise ConfigError(f"--resume {resume} knows its own rows and folder", fix="leave the rest out")
        folder, comparison = resume, open_comparison(resume)
    else:
        target, overrides = _target_of(words or [])
        flags = {"data.dir": data_dir, "device": device, "train.batch_size": batch_size,
                 "train.epochs": epochs, "train.max_steps": max_steps}  # fmt: skip
        overrides += [f"{key}={value}" for key, value in flags.items() if value is not None]
        request = Request(
            target=target,
            overrides=tuple(overrides),
            rows=tuple(_asked_rows(rows, precisions, simulate=simulate)),
            looks=LOOKS if seeds is None else (seeds,),
            margin=margin,
            budget_s=None if budget is None else seconds_of(budget),
            at_once=at_once,
            price=price,
            best=best,
        )
        folder, comparison = new_comparison(request, out)
    screen = Console(stderr=True)
    screen.print(f"interrupted? go on with: {suggested('compare', '--resume', folder)}", style="dim", soft_wrap=True)
    try:
        run_comparison(
            folder, comparison, lambda line: screen.print(line, highlight=False, markup=False, soft_wrap=True)
        )
    except Interrupted as error:
        raise Interrupted(
            f"comparison stopped after {counted(len(comparison.runs), 'run')}; the run under way is saved as well",
            fix=f"go on with: {suggested('compare', '--resume', folder)}",
            exit_code=error.exit_code,
        ) from error
    lines = lines_of(comparison)
    draw_comparison(lines, comparison.metric, folder / "report" / "curves.png")
    (folder / "report" / "comparison.json").write_text(json.dumps(comparison_json(comparison), indent=2) + "\n")
    if as_json:
        typer.echo(json.dumps(comparison_json(comparison), indent=2))
    else:
        show_comparison(lines, comparison.metric, notes_of(comparison), result_console())
    if any(verdict.word != "same" for verdict in comparison.verdicts().values()):
        raise typer.Exit(1)


def _target_of(words: list[str]) -> tuple[str, list[str]]:
    if not words or "=" in words[0]:
        raise ConfigError("nothing to compare", fix="name a workload or a file first: halfstep compare unet")
    return words[0], words[1:]


def _asked_rows(rows: list[str] | None, precisions: str, *, simulate: bool) -> list[Row]:
    from halfstep.use.compare_run import Row

    if rows:
        return [_row(text) for text in rows]
    names = [name.strip() for name in precisions.split(",") if name.strip()]
    return [Row(name=name, overrides=_precision(name, simulate=simulate)) for name in names]


def _precision(name: str, *, simulate: bool) -> tuple[str, ...]:
    """Strict: a row that quietly ran in another format would compare nothing."""
    how = "precision.simulate=true" if simulate and name not in ("fp32", "tf32") else "precision.strict=true"
    return (f"precision={name}", how)


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
