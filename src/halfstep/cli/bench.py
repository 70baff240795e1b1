"""`halfstep bench`: how fast is a training step here, in which precision and way, and against whom?"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from halfstep.errors import ConfigError, nearest

if TYPE_CHECKING:
    from halfstep.bench.bench import Request
    from halfstep.bench.runner import Problem
    from halfstep.bench.settings import StatedRow
    from halfstep.hardware.facts import Hardware

WAYS = ("eager", "compile", "graph", "auto")
PEERS = ("plain", "lightning", "accelerate")
VARIANTS = ("documented", "tuned", "graphs")
STEPS = {"cuda": 100, "cpu": 20}
"""Timed steps by default."""
DEFAULT_WORKLOAD = "unet"
PIPE_WIDTH = 200

WHAT, OUTPUT = "What is measured", "What becomes of it"


def command(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="WORKLOAD|CONFIG.yaml KEY=VALUE", help="What would be trained (default unet), then settings."
        ),
    ] = None,
    batch_size: Annotated[int | None, typer.Option(help="Samples of a step.", rich_help_panel=WHAT)] = None,
    image_size: Annotated[int | None, typer.Option(help="Side of the images.", rich_help_panel=WHAT)] = None,
    precisions: Annotated[
        str, typer.Option(help="fp32,tf32,bf16,fp16,fp8,auto; default: those this device has.", rich_help_panel=WHAT)
    ] = "",
    ways: Annotated[
        str, typer.Option(help="eager,compile,graph,auto; default: all the device can.", rich_help_panel=WHAT)
    ] = "",
    against: Annotated[
        str,
        typer.Option(
            help="plain,lightning,accelerate: the same step by others; plain:graphs is one variant of one.",
            rich_help_panel=WHAT,
        ),
    ] = "",
    steps: Annotated[
        int | None, typer.Option(help="Timed steps a row; default 100, on a CPU 20.", rich_help_panel=WHAT)
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1.", rich_help_panel=WHAT)] = None,
    cold_start: Annotated[
        bool,
        typer.Option("--cold-start", help="Also time the start with an empty compiler cache.", rich_help_panel=WHAT),
    ] = False,
    explain: Annotated[
        bool, typer.Option("--explain", help="Where the time goes, and what would gain most.", rich_help_panel=WHAT)
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.", rich_help_panel=OUTPUT)] = False,
    picture: Annotated[Path | None, typer.Option(help="Draw a bar chart.", rich_help_panel=OUTPUT)] = None,
    save: Annotated[Path | None, typer.Option(help="Write the result as JSON.", rich_help_panel=OUTPUT)] = None,
    baseline: Annotated[
        Path | None,
        typer.Option(help="A file of --save: exit 1 where a row is slower or larger now.", rich_help_panel=OUTPUT),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite files.", rich_help_panel=OUTPUT)] = False,
) -> None:
    """How fast is a training step here, in which precision and way, and against whom? No data are needed.

    A row a precision and way: time, speedup, memory, energy, share of the floor, loss, start.

    Example:

        halfstep bench unet --precisions fp32,bf16 --picture speed.png

        halfstep bench resnet50 --batch-size 64 --ways auto --against plain

        halfstep bench unet --save before.json

        halfstep bench unet --baseline before.json

        halfstep bench unet --explain
    """
    if explain and (baseline or cold_start):
        other = "--baseline" if baseline else "--cold-start"
        raise ConfigError(f"--explain takes a step apart, {other} times whole ones", fix="one of them")
    from halfstep.bench.record import refuse_to_overwrite

    refuse_to_overwrite([picture, save], force=force)
    if save and baseline and save.resolve() == baseline.resolve():
        raise ConfigError(f"--save {save} would overwrite the baseline", fix="another name for one of them")
    if picture:
        from halfstep.report.picture_file import refuse_unknown_format

        refuse_unknown_format(picture)
    flags = {"batch_size": batch_size, "image_size": image_size, "device": device}
    timed = None if explain else steps
    named = with_workload(words or [])
    hardware, problem, request = prepared(
        named, flags, split(precisions), ways, against, timed, cold_start=cold_start, explain=explain
    )
    from halfstep.bench.explain_data import stated_folder

    folder = stated_folder(named[0], named[1:], flags)
    if explain:
        from halfstep.cli.bench_explain import explain_request, show_explanations

        found = explain_request(hardware, problem, request, steps=steps, folder=folder)
        return show_explanations(found, as_json=as_json, picture=picture, save=save)
    if folder:
        said = f"data.dir={folder} is not read: one random batch of such a run's size is timed (--explain reads it)"
        typer.secho(said, fg="yellow", err=True)
    return deliver(measured(hardware, problem, request, baseline), as_json=as_json, picture=picture, save=save)


def deliver(found: dict[str, Any], *, as_json: bool, picture: Path | None, save: Path | None) -> None:
    """Save, show and draw; exit 1 where something got worse or nothing could be measured, 130 after Ctrl-C."""
    try:
        if save:
            from halfstep.bench.record import save as save_record

            save_record(found, save)
    finally:
        show(found, as_json=as_json)
    if picture and any(row["window_ms"] for row in found["rows"]):
        from halfstep.report.bench_picture import draw_bench

        draw_bench(found, picture)
    if found["stopped"]:
        raise typer.Exit(130)
    for line in found["regressions"]:
        typer.secho(f"regression: {line}", fg="red", err=True)
    if found["regressions"] or not any(row["window_ms"] for row in found["rows"]):
        raise typer.Exit(1)


def with_workload(words: list[str]) -> list[str]:
    """The words with what is trained in front; the default is taken where none is named, and said."""
    if words and "=" not in words[0]:
        return words
    typer.secho(f"no workload named: this is {DEFAULT_WORKLOAD}", fg="yellow", err=True)
    return [DEFAULT_WORKLOAD, *words]


def split(text: str, option: str = "", allowed: tuple[str, ...] = ()) -> tuple[str, ...]:
    """`a,b` as its words, in the order given; a word that the option does not take is refused."""
    found = tuple(dict.fromkeys(word.strip().lower() for word in text.split(",") if word.strip()))
    for word in found:
        if allowed and word not in allowed:
            plain = ", ".join(name for name in allowed if ":" not in name)
            raise ConfigError(f"{option} takes no {word!r}", why=f"it takes {plain}", fix=nearest(word, allowed))
    return found


def prepared(
    words: list[str],
    flags: Mapping[str, object],
    precisions: tuple[str, ...],
    ways: str,
    against: str,
    steps: int | None,
    *,
    cold_start: bool,
    explain: bool,
) -> tuple[Hardware, Problem, Request]:
    """Everything that can be wrong is found here, before anything is measured."""
    variants = (f"{peer}:{kind}" for peer in PEERS for kind in VARIANTS)
    named = split(ways, "--ways", WAYS), split(against, "--against", (*PEERS, *variants))
    from halfstep.config.aliases import precision_name

    asked = tuple(dict.fromkeys(precision_name(word, "--precisions") for word in precisions))
    import torch

    from halfstep.bench.bench import Request
    from halfstep.bench.laps import schedule_for
    from halfstep.bench.peers import require_peers
    from halfstep.bench.problem import problem_for
    from halfstep.bench.settings import bench_config, default_precisions, default_ways, stated_rows
    from halfstep.hardware.probe import probe

    require_peers(named[1])
    hardware = probe(str(flags["device"] or "auto"))
    place = torch.device(hardware.device)
    schedule = schedule_for(STEPS.get(place.type, STEPS["cpu"]) if steps is None else steps, place)
    config = bench_config(words[0], words[1:], flags, small=hardware.kind == "cpu", against=named[1])
    stated = stated_rows(words[0], words[1:], flags)
    if explain and "--ways" in stated and stated["--ways"].value == "auto":
        del stated["--ways"]  # trials are no way of a step that could be taken apart
    unasked = ("auto",) if explain else default_precisions(hardware)
    request = Request(
        precisions=without_auto(chosen("--precisions", asked, stated, unasked), hardware),
        ways=chosen("--ways", named[0], stated, default_ways(place)),  # type: ignore[arg-type]
        against=named[1],
        schedule=schedule,
        cold_start=cold_start,
    )
    return hardware, problem_for(config, place), request


def chosen(
    option: str, asked: tuple[str, ...], stated: Mapping[str, StatedRow], unasked: tuple[str, ...]
) -> tuple[str, ...]:
    """What the option asks for, else what the config states, which is said, else all that is usual here."""
    if asked or option not in stated:
        return asked or unasked
    row = stated[option]
    typer.secho(f"{option} {row.value}, as {row.where} says; {option} takes others", fg="yellow", err=True)
    return (row.value,)


def without_auto(precisions: tuple[str, ...], hardware: Hardware) -> tuple[str, ...]:
    """`auto` as the precision that `halfstep train` takes on this device, and why it does."""
    from halfstep.precision.decide import decide

    plan = decide("auto", hardware)
    if "auto" in precisions:
        typer.secho(f"auto is {plan.granted} here: {plan.reason}", fg="yellow", err=True)
    return tuple(dict.fromkeys(plan.granted if name == "auto" else name for name in precisions))


def measured(hardware: Hardware, problem: Problem, request: Request, baseline: Path | None) -> dict[str, Any]:
    """The record, with what is worse than in the baseline. Nothing that runs inside can write to standard output."""
    import contextlib
    import os

    from rich.console import Console

    from halfstep.bench.baseline import Earlier, earlier_rows, refuse_without_common_rows, regressions
    from halfstep.bench.bench import bench, runners
    from halfstep.bench.floor import step_flops
    from halfstep.bench.record import circumstances, command_line, results
    from halfstep.hardware.cache import cache_directory, measured_once
    from halfstep.hardware.measure import measure

    progress = Console(stderr=True)
    with contextlib.redirect_stdout(sys.stderr), progress.status("counting") as status:
        flops = step_flops(problem)
        about = circumstances(problem, request, hardware, flops, command_line())
        before = earlier_rows(baseline, about) if baseline else Earlier(rows={})
        if baseline:
            refuse_without_common_rows(before.rows, runners(problem, request, hardware))
        status.update("measuring matmuls")
        rated = measured_once(hardware, cache_directory(os.environ), measure)

        def tell(row: str) -> None:
            status.update(f"measuring {row}")
            if not progress.is_terminal:  # where a status is not shown
                progress.print(f"measuring {row}", highlight=False)

        benched = bench(problem, request, rated, flops, tell)
    compared = {
        "regressions": regressions(before.rows, benched.rows),
        "compared_rows": [row.label for row in benched.rows if row.label in before.rows and not row.simulated],
        "not_compared_rows": [row.label for row in benched.rows if row.simulated] if baseline else [],
        "baseline_rows": len(before.rows),
    }
    found = results(benched)
    return {**about, **found, **compared, "warnings": [*found["warnings"], *filter(None, [before.warning])]}


def show(found: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        import json

        typer.echo(json.dumps(found, indent=2))
        return
    from rich.console import Console

    from halfstep.report.bench_table import show_bench

    console = Console()
    # A file or a pipe has no width; rich would squeeze the table into 80 columns.
    show_bench(found, console if console.is_terminal else Console(width=PIPE_WIDTH))
