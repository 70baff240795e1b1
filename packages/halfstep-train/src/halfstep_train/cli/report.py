"""`halfstep report`: write runs or a comparison as one HTML page."""

from __future__ import annotations

import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from halfstep.errors import CheckpointError, format_count
from halfstep_train.cli.completion import complete_run


def command(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN...|COMPARISON", help="Runs, or one comparison.", autocompletion=complete_run),
    ],
    out: Annotated[
        Path | None, typer.Option(metavar="FILE.html", help="Output file.", show_default="RUN/report/report.html")
    ] = None,
    open_it: Annotated[bool, typer.Option("--open", help="Open it in the browser.")] = False,
) -> None:
    """Write one HTML file for a run, for several runs side by side, or for a comparison.

    It shows zoomable curves, the plan with its reasons, where the time went, faults, samples, and every setting with
    its source. The file needs no network and no server.

    Example:

        halfstep report runs/unet-20250101-120000 --open

        halfstep report runs/unet-fp32 runs/unet-bf16 --out both.html
    """
    path = write_report(runs, out)
    typer.echo(f"wrote {path}")
    if open_it and not webbrowser.open(path.resolve().as_uri()):
        typer.echo("no browser was found: open the file yourself", err=True)


def write_report(runs: list[Path], out: Path | None) -> Path:
    """Write the HTML page of runs or of one comparison, and return its path."""
    from halfstep.disk import write_atomically
    from halfstep_train.report.page.read_run import read_run
    from halfstep_train.report.page.render import render_runs

    if len(runs) == 1 and (runs[0] / "comparison.json").is_file():
        page = render_comparison_page(runs[0])
    else:
        records = [read_run(path) for path in runs]
        page = render_runs(records)
    file = out or runs[0] / "report" / "report.html"
    if out is None:
        file.parent.mkdir(exist_ok=True)
    try:
        write_atomically(file, page, follows_links=out is not None)
    # Its advice is about checkpoints; here another path is enough.
    except CheckpointError as error:
        error.fix = "choose a writable path with free space: --out FILE.html"
        raise
    return file


def render_comparison_page(folder: Path) -> str:
    """Render the page of a comparison: table, notes, curves and settings."""
    from halfstep_train.report.page.render import Chart, Series, render_comparison
    from halfstep_train.use.compare import open_comparison
    from halfstep_train.use.compare_table import build_columns, build_lines, collect_notes, compute_band

    comparison = open_comparison(folder)
    if not comparison.count_whole_seeds():
        raise CheckpointError(
            f"no seed in {folder} has a run of every row yet", fix=f"halfstep compare --resume {folder}"
        )
    lines = build_lines(comparison)
    series = []
    for number, line in enumerate(lines):
        # Three curves per row: the mean, and dashed the lowest and highest of all seeds.
        steps, *curves = compute_band(line.curves)
        all_seeds = f"{line.title}, all seeds"
        for name, values in zip((line.title, all_seeds, all_seeds), curves, strict=True):
            points = [(float(step), value) for step, value in zip(steps, values, strict=True)]
            series += [Series(name=name, points=points, colour=number, dashed=name != line.title)] if points else []
    chart = Chart(title=comparison.metric, x="step", series=series)
    about = (
        f"margin {comparison.margin:.4g} in {comparison.metric}, {format_count(comparison.count_whole_seeds(), 'seed')}"
    )
    columns = build_columns(lines, comparison.metric)
    summary = next((run.summary for run in comparison.runs if run.summary), {})
    return render_comparison(
        folder.resolve().name, about, columns, collect_notes(comparison), [chart], comparison.settings, summary
    )
