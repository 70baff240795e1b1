"""The rows of `halfstep bench`, timed or, with `--explain`, taken apart; written, shown and drawn."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import typer
from rich.console import Console
from rich.text import Text

from halfstep.bench.bench import STOPPED, Request, Tell, bench, runners
from halfstep.bench.explain import NotExplained, explain_rows, refuse_unexplainable
from halfstep.bench.problem import step_flops
from halfstep.bench.record import Record, circumstances, command_line, results
from halfstep.bench.record import save as save_record
from halfstep.bench.row import Row
from halfstep.cli.bench_request import Files
from halfstep.disk import find_cache_directory
from halfstep.hardware.cache import measured_once
from halfstep.hardware.measure import measure
from halfstep.report import bench_view
from halfstep.report.bench_progress import RowsLeft
from halfstep.report.evaluation_view import result_console
from halfstep.report.explain_view import Explanation, explain_view

if TYPE_CHECKING:
    from halfstep.bench.problem import Problem, Runner
    from halfstep.hardware.facts import Hardware

ABOUT = ("command", "date", "device", "versions", "problem")
"""What a stored explanation needs to be made again."""
STEPS = {"cuda": 10, "cpu": 5}
"""Timed, and then profiled, by default: kernels vary far less than whole steps."""
SILENT = "6"
"""Above every level of the profiler's own log (Kineto), whose highest, 5, announces each start and stop."""


def time_rows(hardware: Hardware, problem: Problem, request: Request, files: Files, *, as_json: bool) -> None:
    with _at_work(hardware, problem, request, repeats_first=request.repeat_first) as work:
        benched = bench(problem, request, work.hardware, work.flops, work.tell)
    record = work.about | results(benched)

    def show() -> None:
        bench_view.show_bench(record, result_console(200))

    has_rows = any(row.is_measured for row in benched.rows)
    _deliver(record, files, show, as_json=as_json, has_rows=has_rows, is_stopped=benched.is_stopped)


def take_rows_apart(
    hardware: Hardware, problem: Problem, request: Request, files: Files, *, steps: int | None, as_json: bool
) -> None:
    steps = STEPS.get(problem.device.type, STEPS["cpu"]) if steps is None else steps
    refuse_unexplainable(request.modes, steps)
    if problem.device.type == "cpu":
        # Read when the profiler first starts. Not on a GPU, where that log tells why the driver lets nobody count.
        os.environ.setdefault("KINETO_LOG_LEVEL", SILENT)
    with _at_work(hardware, problem, request, repeats_first=False) as work:
        rows = list(explain_rows(work.asked, problem, work.hardware, steps=steps, flops=work.flops, tell=work.tell))
    explained = [row for row in rows if isinstance(row, Explanation)]
    refused = [row for row in rows if isinstance(row, NotExplained)]
    record = {
        **{name: work.about[name] for name in ABOUT},
        "steps": steps,
        "explained": [row.to_json() for row in explained],
        "not_explained": [dataclasses.asdict(row) for row in refused],
    }

    def show() -> None:
        if not explained:
            return
        console = result_console(120)
        console.print(Text(f"{bench_view.title(record)}\n", style="bold"), soft_wrap=True)
        for row in explained:
            console.print(explain_view(row), "")

    for row in refused:
        typer.secho(f"not explained: {row.title}: {row.reason}", fg="yellow", err=True)
    is_stopped = any(row.reason == STOPPED for row in refused)
    _deliver(record, files, show, as_json=as_json, has_rows=bool(explained), is_stopped=is_stopped)


class Work(NamedTuple):
    """What the rows of a request need."""

    hardware: Hardware
    """With its measured rates."""
    flops: int
    about: Record
    asked: Sequence[Runner | Row]
    tell: Tell


@contextlib.contextmanager
def _at_work(hardware: Hardware, problem: Problem, request: Request, *, repeats_first: bool) -> Iterator[Work]:
    """Progress is on standard error; nothing that runs inside can write to standard output."""
    with contextlib.redirect_stdout(sys.stderr):
        console = Console(stderr=True)
        with console.status("measuring matmuls") as status:
            rated = measured_once(hardware, find_cache_directory(), measure)
            status.update("counting")
            flops = step_flops(problem)
            about = circumstances(problem, request, hardware, flops, command_line(sys.argv[1:]))
            asked = list(runners(problem, request, rated))
            # Rows of a kind take alike, whatever their precision.
            kinds = [f"{row.name} {row.variant}" for row in asked if not isinstance(row, Row)]
            left = RowsLeft(kinds, console, repeats_first=repeats_first)
            status.update(left)
            yield Work(rated, flops, about, asked, left.begin)


def _deliver(
    record: Record, files: Files, show: Callable[[], None], *, as_json: bool, has_rows: bool, is_stopped: bool
) -> None:
    """Save, show and draw; exit 1 where nothing could be measured, 130 after Ctrl-C."""
    files = files if has_rows else files.without_outputs()
    try:
        if files.save:
            save_record(record, files.save)
    finally:
        if as_json:
            typer.echo(json.dumps(record, indent=2))
        else:
            show()
    if files.picture:
        bench_view.draw_bench(record, files.picture)
    if is_stopped:
        raise typer.Exit(130)
    if not has_rows:
        raise typer.Exit(1)
