"""What speed.py does in processes of its own: filling the compiler's caches, several at once, and timing starts.

Compiling is the host's work and can be shared; choosing between compiled kernels is the device's. A choice that was
made while others used the device says little, so choices of the filling are forgotten: which block sizes the compiler
took, and which mode `auto` took. The timed process makes them again, on a quiet device, from kernels that are compiled.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from halfstep.errors import HardwareError
from halfstep.hardware.clock import wait_for
from halfstep.hardware.device_facts import Hardware
from halfstep_train.bench.bench import BenchRequest, list_runners
from halfstep_train.bench.measure_row import CacheWatch, Row
from halfstep_train.bench.problem import Runner
from halfstep_train.tune.modes import keep_compiled_code
from speed_cases import Case, problem_of, row_requests

FILLING_STEPS = 3
CHOICES = "*.best_config"
"""Files in which inductor keeps the block sizes it took for a kernel."""

Found = TypeVar("Found")


@contextlib.contextmanager
def own_decisions() -> Iterator[None]:
    """What `auto` decides is neither found nor left; compiled code is."""
    keep_compiled_code()
    before = os.environ.get("XDG_CACHE_HOME")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        try:
            yield
        finally:
            os.environ.pop("XDG_CACHE_HOME")
            os.environ.update({} if before is None else {"XDG_CACHE_HOME": before})


def fill_caches(
    cases: dict[str, Case], modes: tuple[Any, ...], hardware: Hardware, *, at_once: int, deadline: float | None
) -> None:
    """Every row of every case makes a few steps, each in a process of its own, so many at a time."""
    began = time.time()
    jobs = [
        (f"{name} {row}", case, request)
        for name, case in cases.items()
        for row, request in row_requests(case, modes).items()
    ]

    def fill(job: tuple[str, Case, BenchRequest]) -> None:
        label, case, request = job
        if deadline is not None and time.monotonic() > deadline:
            return print(f"{time.strftime('%X')} no time was left to fill the cache of {label}", flush=True)
        start = time.perf_counter()
        try:
            in_own_process(fill_one, case, request, make_sendable(hardware))
            said = f"filled the cache of {label}"
        # Whatever a peer or its process dies of: the timed row will tell, and starts with what there is.
        except Exception as error:
            said = f"could not fill the cache of {label}: {type(error).__name__}: {error}"
        return print(f"{time.strftime('%X')} {said} ({time.perf_counter() - start:.0f} s)", flush=True)

    with ThreadPoolExecutor(at_once) as threads:
        list(threads.map(fill, jobs))
    forget_choices(Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]), began)


def forget_choices(folder: Path, began: float) -> None:
    """Those made since `began`, a time of `time.time`."""
    for path in folder.rglob(CHOICES):
        if path.stat().st_mtime >= began:
            path.unlink()


def make_sendable(hardware: Hardware) -> Hardware:
    """Return it with tables that can be pickled."""
    return replace(hardware, support=dict(hardware.support), published_tflops=dict(hardware.published_tflops))


def fill_one(case: Case, request: BenchRequest, hardware: Hardware) -> None:
    """In a process of its own: what is compiled for these steps is on disk afterwards."""
    with own_decisions():
        only_runner(case, request, hardware).train(FILLING_STEPS, lambda: None)


def starts(case: Case, mode: str, hardware: Hardware) -> dict[str, Any]:
    """halfstep's first start ever and its second, trials of `auto` included: two processes and one new cache."""
    request = next(iter(row_requests(case, (mode,)).values()))
    with tempfile.TemporaryDirectory() as folder:
        cold, warm = (in_own_process(start_once, case, request, make_sendable(hardware), folder) for _ in range(2))
    return {"mode": mode, "date": time.strftime("%Y-%m-%d"), "cold": cold, "warm": warm}


def start_once(case: Case, request: BenchRequest, hardware: Hardware, folder: str) -> dict[str, Any]:
    """In a process of its own: from a model on the host to the end of the first step."""
    compiled = {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor", "TRITON_CACHE_DIR": f"{folder}/triton"}
    os.environ.update({"XDG_CACHE_HOME": folder, **compiled})
    runner = only_runner(case, request, hardware)
    seconds, cache = first_step(runner, torch.device(hardware.device))
    return {"s": seconds, "cache": cache, "remarks": getattr(runner, "remarks", [])}


def only_runner(case: Case, request: BenchRequest, hardware: Hardware) -> Runner:
    [runner] = list_runners(problem_of(case, hardware), request, hardware)
    if isinstance(runner, Row):
        raise HardwareError(f"{runner.label} cannot run: {runner.reason}")
    return runner


def in_own_process(function: Callable[..., Found], *arguments: Any) -> Found:
    """One process for one call: nothing compiled, loaded or allocated before it."""
    with ProcessPoolExecutor(max_workers=1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def first_step(runner: Runner, device: torch.device) -> tuple[float, str]:
    """Seconds from nothing to the end of the first step, and how the compiler found its cache."""
    watch, began = CacheWatch(), time.perf_counter()
    seconds: list[float] = []

    def after_step() -> None:
        wait_for(device)
        seconds.append(time.perf_counter() - began)

    runner.train(1, after_step)
    return seconds[0], watch.get_state()
