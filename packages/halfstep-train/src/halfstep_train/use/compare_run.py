"""Run a comparison: train or resume rows with seeds, one after the other or in parallel processes."""

from __future__ import annotations

import gc
import math
import multiprocessing
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from halfstep.disk import parse_json
from halfstep.errors import (
    CheckpointError,
    HalfstepError,
    Interrupted,
    MemoryLimitError,
    TrainingStopped,
    summarise_error,
)
from halfstep.hardware.probe import probe
from halfstep.precision.decide import explain_simulation
from halfstep_train.config.load import Loaded
from halfstep_train.report.page.read_run import read_run
from halfstep_train.run.memory.out_of_memory import OutOfMemory
from halfstep_train.run.train import train
from halfstep_train.use.equivalence import SEEDS
from halfstep_train.workloads import load

End = Literal["done", "stopped", "out of memory"]
"""How a run ended: normally, stopped by its guard, or out of memory."""
OUT_OF_MEMORY: End = "out of memory"


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparedRow:
    """One row of the table: a name and its overrides."""

    name: str
    overrides: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class CompareRequest:
    """What is compared, fixed before the first run."""

    target: str
    overrides: tuple[str, ...]
    rows: tuple[ComparedRow, ...]
    seeds: int = SEEDS
    margin: float | None = None
    """Largest difference that counts as the same; None: half a point, or 1 % of a loss."""
    budget_s: float | None = None
    at_once: int = 1
    price: float | None = None
    """Price of one device hour."""
    best: bool = False
    """Judge each run by its best validation instead of its last one."""

    @property
    def baseline(self) -> ComparedRow:
        return self.rows[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunOutcome:
    """The result of one run."""

    row: str
    seed: int
    value: Annotated[float, BeforeValidator(lambda value: math.nan if value is None else value)]
    """The headline metric at the last (or best) validation; NaN if the run was stopped."""
    curve: tuple[tuple[int, float, float], ...]
    """(step, seconds, value) of each validation."""
    summary: dict[str, Any]
    alone: bool
    """True if no other run ran at the same time: only then are time, memory and energy meaningful."""
    end: End = "done"
    stopped: str = ""
    """Why the guard stopped it, or that it ran out of memory."""


def load_row(request: CompareRequest, row: ComparedRow, seed: int = 0) -> Loaded:
    """Load the config of a row: common overrides, then the row's, then the seed; later ones win.

    A format that the device lacks is simulated unless the user decided otherwise: a fallback would compare another
    format.
    """
    # A comparison prints one table for all its runs.
    given = (*request.overrides, *row.overrides, f"train.seed={seed}", "log.quiet=true")
    # One override per key: the loader refuses two of one layer that disagree.
    last = {override.split("=", 1)[0]: override for override in given}
    loaded = load(request.target, overrides=list(last.values()))
    is_open = loaded.origins["precision.simulate"].layer == "default"
    if is_open and explain_simulation(loaded.config.precision, probe(loaded.config.device)):
        return load(request.target, overrides=[*last.values(), "precision.simulate=true"])
    return loaded


def train_row(request: CompareRequest, row: ComparedRow, seed: int, folder: Path, *, alone: bool = True) -> RunOutcome:
    """Train this row with this seed; resume an interrupted run from its checkpoint."""
    loaded = load_row(request, row, seed)
    end: End = "done"
    stopped, is_resumed = "", bool(list(folder.glob("checkpoints/step-*")))
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".log").open("a") as log, redirect_stdout(log), redirect_stderr(log):
        try:
            if is_resumed:
                train(loaded, resume=folder)
            else:
                shutil.rmtree(folder, ignore_errors=True)  # left by a run interrupted before its first checkpoint
                train(loaded, out=folder)
        except TrainingStopped as error:
            end, stopped = "stopped", error.what
        except (MemoryLimitError, OutOfMemory) as error:
            what = error.what if isinstance(error, MemoryLimitError) else summarise_error(error)
            end, stopped = OUT_OF_MEMORY, what if alone else f"{what}, with other runs at the same time"
        except Interrupted:
            raise
        except HalfstepError as error:
            error.what = f"{row.name}, seed {seed}: {error.what}"
            if is_resumed and isinstance(error, CheckpointError):
                error.fix = f"delete {folder}: the comparison then trains this run again"
            raise
    if end != "done":
        gc.collect()  # free its model and batches for the next runs
    summary, curve = dict[str, Any](), list[tuple[int, float, float]]()
    if end == "done":
        record = read_run(folder)
        summary = record.summary
        # Demo data are generated in the run's folder.
        if (digest := folder / "data.json").is_file() and not (folder / "data").is_dir():
            summary = {**summary, "data": "of digest " + str(parse_json(digest.read_text())["digest"])[:12]}
        curve = [(v["step"], v["elapsed_s"], float(v[record.metric])) for v in record.select_kind("val")]
    value = curve[-1][2] if curve else math.nan
    if request.best and curve:
        value = (max if summary["mode"] == "max" else min)(point[2] for point in curve)
    return RunOutcome(
        row=row.name,
        seed=seed,
        value=value,
        curve=tuple(point for point in curve if math.isfinite(point[2])),
        summary=summary,
        alone=alone and not is_resumed,
        end=end,
        stopped=stopped,
    )


def remove_all_but_records(folder: Path) -> None:
    """Remove checkpoints and data of a run: twenty seeds of three rows would keep sixty models.

    Call it after the outcome is stored: an interrupted run without checkpoints could not be resumed.
    """
    for name in ("checkpoints", "data", "model", "frozen"):
        shutil.rmtree(folder / name, ignore_errors=True)


Job = tuple[ComparedRow, int, Path]
Run = Callable[[ComparedRow, int, Path], RunOutcome]


def run_in_parallel(run: Run, jobs: Sequence[Job], at_once: int) -> Iterator[RunOutcome]:
    """Run `at_once` jobs at a time in processes; yield their outcomes in the order of the jobs."""
    # Spawn, not fork: CUDA does not work in a forked child of a process that has used it.
    pool = ProcessPoolExecutor(at_once, mp_context=multiprocessing.get_context("spawn"), initializer=_exit_with_parent)
    try:
        with _ignore_ctrl_c():
            outcomes = pool.map(partial(_run_one, run), jobs)
        yield from outcomes
    except BrokenProcessPool as error:
        raise Interrupted("the worker process of a run was killed: by a signal, or out of memory") from error
    finally:
        for process in multiprocessing.active_children():
            process.terminate()
        pool.shutdown(cancel_futures=True)


_busy, _leaving = threading.Lock(), threading.Event()
"""In a worker process: held while a run trains, and set once no further run may start."""


def _run_one(run: Run, job: Job) -> RunOutcome:
    with _busy:
        if _leaving.is_set():
            raise Interrupted("asked to leave")
        try:
            return run(*job)
        except Interrupted:
            _leaving.set()
            raise


@contextmanager
def _ignore_ctrl_c() -> Iterator[None]:
    """Ignore SIGINT in the workers started inside: a terminal sends it to all processes, and the parent stops them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    usual = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)


def _exit_with_parent() -> None:
    """Exit this worker when its parent is killed: its run must be unlocked when the comparison is resumed."""
    comparison = multiprocessing.parent_process()

    def wait() -> None:
        assert comparison is not None
        comparison.join()
        os.kill(os.getpid(), signal.SIGTERM)
        with _busy:  # wait until the run is saved
            os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
