"""Rows of a table of steps: each in a process of its own, and the one that halfstep itself makes."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from halfstep_train.bench.bench import BenchRequest, conclude, list_runners, measure_runner
from halfstep_train.bench.measure_row import Row, Schedule
from halfstep_train.bench.problem import build_problem, count_step_flops
from halfstep_train.config.schema import RunConfig
from profiled import Profiled
from recording import finish_device_work, time_steps
from row_turns import Turn, rows_in_turn


def rows_parser(about: str | None, rows: Sequence[str], *row_words: str) -> argparse.ArgumentParser:
    """What every table of steps can be asked; `row_words` name what one row of it, in its own process, is told."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default=",".join(rows))
    parser.add_argument("--seconds", type=float, default=0, help="no row starts after so many; 0: no limit")
    parser.add_argument("--at-once", action="store_true", help="compile all rows side by side, time them in turn")
    parser.add_argument("--profile", action="store_true", help="with the kernels of halfstep's step")
    parser.add_argument("--small", action="store_true", help="a tiny model, for trying this on a CPU")
    parser.add_argument("--out", help="folder for the JSON, default benchmarks/results")
    parser.add_argument("--row", nargs=len(row_words) or None, metavar=row_words or None, help=argparse.SUPPRESS)
    return parser


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


def rows(
    script: str, jobs: Sequence[Sequence[str]], *, at_once: bool, seconds: float
) -> Iterator[tuple[Sequence[str], dict[str, Any]]]:
    """Each job's words and what its process found; none starts after so many seconds, 0: no limit."""
    if at_once:
        for (_, *words), found in rows_in_turn([[script, *words] for words in jobs], seconds=seconds):
            yield words, found
        return
    began = time.monotonic()
    for words in jobs:
        is_late = seconds and time.monotonic() - began > seconds
        yield words, {"problem": "no time was left to start it"} if is_late else row_in_a_process(script, words)


def first_steps(step: Callable[[], object], number: int) -> float:
    """Make so many steps; seconds that the first one took, compilation included."""
    began = time.monotonic()
    step()
    finish_device_work()
    first_s = time.monotonic() - began
    for _ in range(number - 1):
        step()
    finish_device_work()
    return first_s


def torch_row(
    batch_of: Callable[[], Any],
    loss_of: Callable[[Any], Tensor],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    turn: Turn,
    *,
    precision: str,
    counts: tuple[int, int, int],
    clip_norm: float = 1.0,
    norm_type: float = 2.0,
    init_scale: float = 2.0**16,
    after_step: Callable[[], object] = lambda: None,
) -> dict[str, Any]:
    """A step of a loop in stock PyTorch, with the loss under autocast; `counts` are warm-up, steps and windows."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    scaler = torch.amp.GradScaler(device.type, enabled=precision == "fp16", init_scale=init_scale)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    last = torch.zeros(())

    def step() -> None:
        nonlocal last
        optimizer.zero_grad(set_to_none=True)
        batch = batch_of()
        with torch.autocast(device.type, dtype=dtype, enabled=dtype is not None):
            loss = loss_of(batch)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), clip_norm, norm_type)
        scaler.step(optimizer)
        scaler.update()
        after_step()
        last = loss.detach()

    warm_up, steps, windows = counts
    start_s = first_steps(step, warm_up)
    turn()
    times = time_steps(step, warmup=2, steps=steps, windows=windows)
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    return {**times, "peak_gb": peak / 1e9, "start_s": start_s, "loss": float(last)}


def halfstep_row(
    config: RunConfig,
    precision: str,
    *,
    warm_up: int = 10,
    window: int = 15,
    turn: Turn | None = None,
    profiles: bool = False,
) -> dict[str, Any]:
    """A step as `halfstep train` makes it, captured as one CUDA graph; eager where there is no GPU.

    `turn` is where it waits, compiled, until it may be timed; `profiles` adds where the time of a step goes.
    """
    turn = turn or Turn()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    hardware = turn.hardware(device)
    problem = build_problem(config, torch.device(hardware.device))
    # On a CPU the script is tried, not timed.
    schedule = (
        Schedule(warm_up=warm_up, ramp=2, window=window) if device == "cuda" else Schedule(warm_up=3, ramp=0, window=1)
    )
    request = BenchRequest(
        precisions=(precision,), modes=("graph" if device == "cuda" else "eager",), schedule=schedule
    )
    flops = count_step_flops(problem)
    [runner] = list_runners(turn.lent_to(problem), request, hardware)
    if isinstance(runner, Row):
        return {"problem": runner.reason}
    profiled = Profiled(runner) if profiles and device == "cuda" else None
    benched = conclude([measure_runner(profiled or runner, problem, request, turn)], flops, hardware)
    row = benched.rows[0]
    if not row.is_measured:
        return {"problem": row.reason}
    return {
        "ms": row.ms,
        "window_ms": list(row.window_ms),
        "peak_gb": (row.peak_bytes or 0) / 1e9,
        "start_peak_gb": (row.start_peak_bytes or 0) / 1e9,
        "reserved_gb": (row.reserved_bytes or 0) / 1e9,
        "start_s": row.start_s,
        "loss": row.loss,
        "flops": flops,
        "floor_ms": row.floor_ms,
        "remarks": list(getattr(runner, "remarks", ())),
        "warnings": list(benched.warnings),
        **({"profile": profiled.table} if profiled else {}),
    }
