"""The rows of `halfstep bench`, timed or, with `--explain`, taken apart."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import typer
from rich.console import Console
from rich.status import Status
from rich.text import Text

from halfstep.bench.bench import STOPPED, Request, Tell, bench, runners
from halfstep.bench.explain_rows import NotExplained, explain_rows, refuse_unexplainable
from halfstep.bench.problem import step_flops
from halfstep.bench.record import circumstances, command_line, results
from halfstep.bench.record import save as save_record
from halfstep.bench.row import Row
from halfstep.cli.bench_request import Files
from halfstep.disk import cache_directory
from halfstep.hardware.cache import measured_once
from halfstep.hardware.measure import measure
from halfstep.report.bench_progress import RowsLeft
from halfstep.report.bench_view import title
from halfstep.report.evaluation_view import result_console
from halfstep.report.explain_view import Explanation, explain_view

if TYPE_CHECKING:
    from halfstep.bench.problem import Problem, Runner
    from halfstep.hardware.facts import Hardware


def measured(hardware: Hardware, problem: Problem, request: Request) -> dict[str, Any]:
    """The record."""
    with progress() as console, console.status("counting") as status:
        flops = step_flops(problem)
        about = circumstances(problem, request, hardware, flops, command_line(sys.argv[1:]))
        asked = list(runners(problem, request, hardware))
        status.update("measuring matmuls")
        rated = measured_once(hardware, cache_directory(), measure)
        tell = telling(asked, console, status, repeats_first=request.repeat_first)
        benched = bench(problem, request, rated, flops, tell)
    return about | results(benched)


def telling(asked: Sequence[Runner | Row], console: Console, status: Status, *, repeats_first: bool = False) -> Tell:
    """Says which row of how many is measured and how long the rest takes; rows of a kind take alike, whatever their
    precision."""
    kinds = [f"{row.name} {row.variant}" for row in asked if not isinstance(row, Row)]
    left = RowsLeft(kinds, console, repeats_first=repeats_first)
    status.update(left)
    return left.begin


@contextlib.contextmanager
def progress() -> Iterator[Console]:
    """A console on standard error; nothing that runs inside can write to standard output."""
    with contextlib.redirect_stdout(sys.stderr):
        yield Console(stderr=True)


ABOUT = ("command", "date", "device", "versions", "problem")
"""What a stored explanation needs to be made again."""
STEPS = {"cuda": 10, "cpu": 5}
"""Timed, and then profiled, by default: kernels vary far less than whole steps."""
SILENT = "6"
"""Above every level of the profiler's own log (Kineto), whose highest, 5, announces each start and stop."""


class Found(NamedTuple):
    """What was explained, and all it depends on."""

    about: dict[str, Any]
    rows: list[Explanation | NotExplained]


def explain_request(hardware: Hardware, problem: Problem, request: Request, *, steps: int | None) -> Found:
    """Every row of the request."""
    steps = STEPS.get(problem.device.type, STEPS["cpu"]) if steps is None else steps
    refuse_unexplainable(request.modes, steps)
    if problem.device.type == "cpu":
        # Read when the profiler first starts. Not on a GPU, where that log tells why the driver lets nobody count.
        os.environ.setdefault("KINETO_LOG_LEVEL", SILENT)
    with progress() as console, console.status("measuring matmuls") as status:
        rated = measured_once(hardware, cache_directory(), measure)
        status.update("counting")
        flops = step_flops(problem)
        about = circumstances(problem, request, hardware, flops, command_line(sys.argv[1:]))
        asked = list(runners(problem, request, rated))
        tell = telling(asked, console, status)
        rows = list(explain_rows(asked, problem, rated, steps=steps, flops=flops, tell=tell))
    return Found({name: about[name] for name in ABOUT} | {"steps": steps}, rows)


def show_explanations(found: Found, files: Files, *, as_json: bool) -> None:
    """Write and print; exit 1 where nothing could be explained, 130 after Ctrl-C."""
    explained = [row for row in found.rows if isinstance(row, Explanation)]
    refused = [row for row in found.rows if isinstance(row, NotExplained)]
    content = {
        **found.about,
        "explained": [row.to_json() for row in explained],
        "not_explained": [dataclasses.asdict(row) for row in refused],
    }
    files = files if explained else files.without_outputs()
    try:
        if files.save:
            save_record(content, files.save)
    finally:
        if as_json:
            typer.echo(json.dumps(content, indent=2))
        elif explained:
            _print(explained, found.about)
    for row in refused:
        typer.secho(f"not explained: {row.title}: {row.reason}", fg="yellow", err=True)
    if any(row.reason == STOPPED for row in refused):
        raise typer.Exit(130)
    if not explained:
        raise typer.Exit(1)


def _print(explained: list[Explanation], about: Mapping[str, Any]) -> None:
    console = result_console(120)
    console.print(Text(f"{title(about)}\n", style="bold"), soft_wrap=True)
    for row in explained:
        console.print(explain_view(row), "")
