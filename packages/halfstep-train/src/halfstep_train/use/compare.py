"""`halfstep compare`: test whether rows of settings are equally good, and measure what each costs.

    runs     every row with paired seeds, seed by seed, until all are done or the budget is spent
    table    time, memory, energy, money, final metric, verdict

Every outcome is written to `comparison.json` at once, so an interrupted comparison can continue.
"""

from __future__ import annotations

import gc
import math
import multiprocessing
import os
import re
import shutil
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, TypeAdapter

from halfstep.disk import lock_folder, parse_json, write_atomically
from halfstep.errors import (
    CheckpointError,
    ConfigError,
    HalfstepError,
    Interrupted,
    MemoryLimitError,
    TrainingStopped,
    format_count,
    format_duration,
    summarise_error,
)
from halfstep.hardware.clock import Stopwatch
from halfstep.hardware.probe import probe
from halfstep.precision.decide import decide, explain_simulation
from halfstep_train.config.foreign import flatten_keys
from halfstep_train.config.load import Loaded
from halfstep_train.report.page.read_run import read_run
from halfstep_train.run.folder import RunFolder, make_paths_absolute, name_run
from halfstep_train.run.memory.out_of_memory import OutOfMemory
from halfstep_train.run.train import train
from halfstep_train.tune.choose import find_asked_mode
from halfstep_train.use.equivalence import SEEDS, RowVerdict, choose_margin, is_wide, judge_rows
from halfstep_train.workloads import load

Say = Callable[[str], None]

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


@dataclass(kw_only=True, slots=True)
class Comparison:
    """A request and the outcomes so far."""

    request: CompareRequest
    runs: list[RunOutcome] = field(default_factory=list)
    spent_s: float = 0.0
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Every setting of each row at the start of the comparison, by row and key."""
    simulated: dict[str, str] = field(default_factory=dict)
    """Why a row is simulated, by row."""

    @property
    def metric(self) -> str:
        """Return the headline metric, as the runs name it."""
        return self._read_from_runs("metric", "metric")

    @property
    def mode(self) -> str:
        return self._read_from_runs("mode", "max")

    @property
    def margin(self) -> float:
        if self.request.margin is not None:
            return self.request.margin
        return choose_margin(self.finals, in_points=self.in_points)

    @property
    def margin_from(self) -> str:
        rule = "half a point" if self.in_points else "1 % of the baseline's mean"
        return rule if self.request.margin is None else "as given"

    @property
    def is_wide(self) -> bool:
        """True if the margin is so wide that "same" means little."""
        return bool(self.finals) and is_wide(self.margin, self.finals, in_points=self.in_points)

    @property
    def finals(self) -> list[float]:
        """Return the baseline's finite metrics."""
        return [run.value for run in self.select_paired(self.request.baseline.name) if math.isfinite(run.value)]

    @property
    def num_wanted(self) -> int:
        return len(self.request.rows) * self.request.seeds

    @property
    def is_spent(self) -> bool:
        return self.request.budget_s is not None and self.spent_s >= self.request.budget_s

    @property
    def ended(self) -> str:
        """Return why no further seeds are run; empty if the comparison is unfinished."""
        if len(self.runs) == self.num_wanted:
            return f"all {format_count(self.request.seeds, 'seed')} are done"
        spent = f"the budget of {self.request.budget_s or 0:g} s is spent (--resume with a larger --budget continues)"
        return spent if self.is_spent else ""

    @property
    def in_points(self) -> bool:
        """True if the metric is a fraction of 1, such as accuracy or IoU, whose margin is given in points.

        A metric adjusted for chance, such as the Rand index, may be negative.
        """
        values = [run.value for run in self.runs if math.isfinite(run.value)]
        return self.mode == "max" and all(abs(value) <= 1 for value in values)

    def _read_from_runs(self, key: str, unknown: str) -> str:
        return next((run.summary[key] for run in self.runs if key in run.summary), unknown)

    def select_outcomes(self, row: str) -> list[RunOutcome]:
        """Return the row's outcomes in the order of their seeds, as they are paired."""
        return sorted((run for run in self.runs if run.row == row), key=lambda run: run.seed)

    def select_paired(self, row: str) -> list[RunOutcome]:
        """Return the row's outcomes for seeds that all rows have; incomplete seeds do not count."""
        return self.select_outcomes(row)[: self.count_whole_seeds()]

    def count_whole_seeds(self) -> int:
        """Count the seeds with a run of every row."""
        seeds = [{run.seed for run in self.runs if run.row == row.name} for row in self.request.rows]
        return len(set.intersection(*seeds))

    def judge(self) -> dict[str, RowVerdict]:
        """Compare each row with the baseline, over the seeds that all rows have."""
        values = {row.name: [run.value for run in self.select_paired(row.name)] for row in self.request.rows}
        baseline = values.pop(self.request.baseline.name)
        return judge_rows(baseline, values, self.margin)


def create_comparison(request: CompareRequest, out: Path | None) -> tuple[Path, Comparison]:
    """Check every row, then create the folder of a new comparison."""
    configs = {row.name: load_row(request, row).config for row in request.rows}
    simulated: dict[str, str] = {}
    for row, config in configs.items():
        hardware = probe(config.device)
        if config.precision.simulate and (missing := explain_simulation(config.precision, hardware)):
            simulated[row] = missing
        try:  # refuse a missing format or mode now, not after the first runs
            find_asked_mode(config.train, decide(config.precision, hardware))
        except HalfstepError as error:
            error.what = f"{row}: {error.what}"
            raise
    name = name_run(configs[request.baseline.name].workload)
    folder = RunFolder.create(str(out) if out else None, f"compare-{name}").path
    comparison = Comparison(request=request, settings=collect_settings(request), simulated=simulated)
    _write(folder, comparison)
    return folder, comparison


def collect_settings(request: CompareRequest) -> dict[str, dict[str, Any]]:
    """Return every setting of each row as stored in JSON, with absolute paths."""
    configs = {row.name: make_paths_absolute(load_row(request, row).config) for row in request.rows}
    return {name: flatten_keys(config.model_dump(mode="json")) for name, config in configs.items()}


def refuse_incomparable_runs(comparison: Comparison) -> None:
    """Raise ConfigError if settings changed since the comparison began: its runs would no longer be paired."""
    now = collect_settings(comparison.request)
    for row, then in comparison.settings.items():
        if changed := find_differences(then, now[row]):
            key = changed[0]
            raise ConfigError(
                f"{row}: {', '.join(changed)} changed since this comparison began",
                why=f"{key} was {then.get(key)}, and is now {now[row].get(key)} in {comparison.request.target}",
                fix="restore it (relative paths refer to the folder where the comparison began), or compare again",
            )


def find_differences(ones: dict[str, Any], others: dict[str, Any]) -> list[str]:
    return sorted(key for key in ones.keys() | others.keys() if ones.get(key) != others.get(key))


COMPARISON = "comparison.json"
STORED = TypeAdapter(Comparison)
"""Writes comparisons as JSON, with NaN as null, and reads them."""


def open_comparison(folder: Path) -> Comparison:
    """Read a stored comparison."""
    path = folder / COMPARISON
    try:
        return STORED.validate_json(path.read_bytes())
    except ValueError as error:
        raise CheckpointError(f"{path} cannot be read: {error}", fix="compare again, into another folder") from error


def run_comparison(folder: Path, comparison: Comparison, say: Say) -> None:
    """Train the missing runs, seed by seed, until all are done or the budget is spent; store each outcome at once."""
    with lock_folder(folder):
        request, kept = comparison.request, comparison.runs
        rows, seeds = format_count(len(request.rows), "row"), format_count(request.seeds, "seed")
        say(f"{rows} x {seeds}: {comparison.num_wanted} runs; {_describe_left(comparison, 0, 0.0)}")
        for name, missing in comparison.simulated.items():
            say(f"warning: {name} is simulated: {missing}; this compares numerics, not speed (--strict refuses it)")
        named = choose_folder_names(request.rows)
        jobs = [(row, seed, folder / "runs" / f"{name}-{seed}")
                for seed in range(request.seeds) for name, row in named.items()]  # fmt: skip
        known = {(run.row, run.seed) for run in kept}
        for row, seed, place in jobs:
            if (row.name, seed) in known:
                remove_all_but_records(place)  # an interruption may have prevented it
        missing_jobs = [job for job in jobs if (job[0].name, job[1]) not in known]
        clock, before_s = Stopwatch(), comparison.spent_s
        outcomes = iter(()) if comparison.is_spent else _run_jobs(request, missing_jobs, kept)
        for number, (job, outcome) in enumerate(zip(missing_jobs, outcomes, strict=False), start=1):
            kept.append(outcome)
            comparison.spent_s = before_s + clock.elapsed_s
            _write(folder, comparison)
            remove_all_but_records(job[2])
            ended = f"({outcome.stopped})" if outcome.stopped else f"{outcome.summary['elapsed_s']:.1f} s"
            left = _describe_left(comparison, number, clock.elapsed_s)
            say(f"{outcome.row}, seed {outcome.seed}: {comparison.metric} {outcome.value:.4f}, {ended} ({left})")
            if comparison.is_spent:
                break
        _write(folder, comparison)


def _describe_left(comparison: Comparison, num_new: int, elapsed_s: float) -> str:
    """Return `3 of 40 runs, about 18 min left`, from the time that this call's runs took."""
    request, done, total = comparison.request, len(comparison.runs), comparison.num_wanted
    if done >= total or not num_new:
        return f"{done} of {total} runs are done" if done else "the first run shows how long they take"
    left_s = (total - done) * elapsed_s / num_new
    if request.budget_s is not None:
        left_s = min(left_s, max(request.budget_s - comparison.spent_s, 0.0))
    return f"{done} of {total} runs, about {format_duration(left_s)} left"


def _run_jobs(request: CompareRequest, jobs: Sequence[Job], known: Sequence[RunOutcome]) -> Iterator[RunOutcome]:
    """Run the jobs one after the other, or several at once if requested. The caller appends to `known` meanwhile."""
    if request.at_once > 1:
        yield from run_in_parallel(partial(train_row, request, alone=False), jobs, request.at_once)
        return
    for row, seed, place in jobs:
        too_large = next((one for one in known if one.row == row.name and one.end == OUT_OF_MEMORY), None)
        # Another seed needs as much memory: do not try the row again.
        yield train_row(request, row, seed, place) if too_large is None else replace(too_large, seed=seed)


def choose_folder_names(rows: Sequence[ComparedRow]) -> dict[str, ComparedRow]:
    """Return a folder name for each row: its name without special characters, numbered if taken."""
    found: dict[str, ComparedRow] = {}
    for number, row in enumerate(rows):
        name = re.sub(r"[^A-Za-z0-9_.+-]", "_", row.name)
        found[f"{name}_{number}" if name in found else name] = row
    return found


def _write(folder: Path, comparison: Comparison) -> None:
    write_atomically(folder / COMPARISON, STORED.dump_json(comparison, indent=1).decode() + "\n")


# --- one run, and several at the same time ---


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
    # Workers inherit it: a terminal sends SIGINT to all processes, and the parent stops them.
    usual = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        try:
            outcomes = pool.map(partial(_run_one, run), jobs)
        finally:
            signal.signal(signal.SIGINT, usual)
        yield from outcomes
    except BrokenProcessPool as error:
        raise Interrupted("the worker process of a run was killed: by a signal, or out of memory") from error
    finally:
        for process in multiprocessing.active_children():
            process.terminate()
        pool.shutdown(cancel_futures=True)


def _run_one(run: Run, job: Job) -> RunOutcome:
    try:
        return run(*job)
    except Interrupted:
        os._exit(1)  # the run is saved; from an exception the pool would go on with the next job


def _exit_with_parent() -> None:
    """Exit this worker when its parent is killed, after saving its run: a resumed comparison needs it unlocked."""
    comparison = multiprocessing.parent_process()

    def wait() -> None:
        assert comparison is not None
        comparison.join()
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, daemon=True).start()
