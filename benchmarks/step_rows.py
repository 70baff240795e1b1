"""Rows of a table of steps: each in a process of its own, and the one that halfstep itself makes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import torch

from halfstep.bench.bench import Request, bench
from halfstep.bench.floor import step_flops
from halfstep.bench.problem import problem_for
from halfstep.bench.step_timer import Schedule
from halfstep.config.schema import RunConfig
from halfstep.hardware.measure import measure
from halfstep.hardware.probe import probe


def row_in_a_process(script: str, words: Sequence[str]) -> dict[str, Any]:
    """What `script words` prints as its last line; what one row compiled or reserved must not help or hurt the next."""
    done = subprocess.run([sys.executable, script, *words], capture_output=True, text=True, check=False)
    print(done.stderr, end="", file=sys.stderr, flush=True)
    try:
        found: dict[str, Any] = json.loads((done.stdout.strip().splitlines() or [""])[-1])
    except ValueError:
        why = (done.stderr.strip().splitlines() or [""])[-1][:300]
        return {"problem": f"ended with {done.returncode}: {why}"}
    return found


def halfstep_row(config: RunConfig, precision: str, *, warm_up: int = 10) -> dict[str, Any]:
    """A step as `halfstep train` makes it, captured as one CUDA graph; eager where there is no GPU."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    hardware = measure(probe(device)) if device == "cuda" else probe(device)
    problem = problem_for(config, torch.device(hardware.device))
    schedule = Schedule(warm_up=warm_up, ramp=2, window=15)
    request = Request(precisions=(precision,), modes=("graph" if device == "cuda" else "eager",), schedule=schedule)
    flops = step_flops(problem)
    benched = bench(problem, request, hardware, flops, lambda line: print(line, file=sys.stderr, flush=True))
    measured = benched.rows[0]
    if not measured.is_measured:
        return {"problem": measured.reason}
    return {
        "ms": measured.ms,
        "window_ms": list(measured.window_ms),
        "peak_gb": (measured.peak_bytes or 0) / 1e9,
        "start_peak_gb": (measured.start_peak_bytes or 0) / 1e9,
        "start_s": measured.start_s,
        "loss": measured.loss,
        "flops": flops,
        "floor_ms": measured.floor_ms,
        "remarks": list(measured.remarks),
        "warnings": list(benched.warnings),
    }
