"""The rows of `halfstep bench`, measured while the terminal shows how far it is."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from halfstep.bench.baseline import Comparison, Earlier, compare, earlier_rows, refuse_without_common_rows
from halfstep.bench.bench import Benched, Request, bench, runners
from halfstep.bench.floor import step_flops
from halfstep.bench.record import circumstances, command_line, results
from halfstep.bench.row import Row
from halfstep.disk import cache_directory
from halfstep.hardware.cache import measured_once
from halfstep.hardware.measure import measure
from halfstep.report.bench_progress import RowsLeft

if TYPE_CHECKING:
    from halfstep.bench.runner import Problem, Runner
    from halfstep.hardware.facts import Hardware


def measured(hardware: Hardware, problem: Problem, request: Request, baseline: Path | None) -> dict[str, Any]:
    """The record, with what is worse than in the baseline."""
    with progress() as console, console.status("counting") as status:
        flops = step_flops(problem)
        about = circumstances(problem, request, hardware, flops, command_line(sys.argv[1:]))
        asked = list(runners(problem, request, hardware))
        before = earlier_rows(baseline, about) if baseline else None
        if before:
            refuse_without_common_rows(before.rows, asked)
        status.update("measuring matmuls")
        rated = measured_once(hardware, cache_directory(), measure)
        left = RowsLeft(kinds_of(asked), console, repeats_first=request.repeat_first)
        status.update(left)
        benched = bench(problem, request, rated, flops, left.begin)
    return about | results(benched) | compared(before, benched)


def kinds_of(asked: Sequence[Runner | Row]) -> list[str]:
    """Of each row that will be run; rows of a kind take alike, whatever their precision."""
    return [f"{row.name} {row.variant}" for row in asked if not isinstance(row, Row)]


@contextlib.contextmanager
def progress() -> Iterator[Console]:
    """A console on standard error; nothing that runs inside can write to standard output."""
    with contextlib.redirect_stdout(sys.stderr):
        yield Console(stderr=True)


def compared(before: Earlier | None, benched: Benched) -> dict[str, Any]:
    """What a record tells of its baseline, with the warnings of both."""
    found = compare(before, benched.rows, benched.repeated) if before else Comparison()
    return {
        "regressions": list(found.regressions),
        "within_drift": list(found.within_drift),
        "baseline_drift": found.drift,
        "compared_rows": list(found.compared),
        "not_compared_rows": list(found.simulated),
        "baseline_rows": len(before.rows) if before else 0,
        "warnings": [*benched.warnings, *([before.warning] if before and before.warning else [])],
    }
