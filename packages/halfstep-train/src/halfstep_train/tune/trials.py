"""Time trial steps on a copy of the model, so that the run stays bit-identical; choose levers of memory by them."""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from halfstep.errors import format_bytes, summarise_error
from halfstep.hardware.clock import Clock, Stopwatch, wait_for
from halfstep.hardware.memory import LiveBytes, get_peak_memory_bytes, reset_peak
from halfstep.precision.plan import Plan
from halfstep.recompute import Recompute
from halfstep.step.optim.adamw8bit import AdamW8bit
from halfstep.step.optim.adamw_bf16 import AdamWBf16
from halfstep.step.optim.by_name import Options, ParamGroups, build_optimizer
from halfstep.step.optim.half_weights import Rounding, is_kept_in_half
from halfstep.step.phases import PhasedStep
from halfstep.step.step import GuardedStep
from halfstep_train.config.schema import RunConfig, TrainConfig
from halfstep_train.data.loader import Loader
from halfstep_train.tune.channels_last import is_only_tried
from halfstep_train.tune.fresh_thread import run_in_fresh_thread
from halfstep_train.tune.modes import UNCAPTURED, Batch, Level, Mode, Notice
from halfstep_train.workloads.base.workload import Workload

# --- train.memory=low ---
#
# Levers, each tried alone and then the best of each kind together:
#
#     activation budget   inductor recomputes what is cheapest until this share of activations is left (compiled only)
#     recompute           pointwise: keep only outputs of matmuls and convolutions; blocks: only the blocks' inputs;
#                         alternate: both in turn
#     optimizer bits      8: AdamW's two moments in a quarter of their bytes
#
# The least memory wins among the settings that take at most TIME_LIMIT times the normal step's time. This module
# decides; the measuring function is passed in.


TIME_LIMIT = 1.1
HOTTER = 0.01
"""Margin below TIME_LIMIT in trials: in a long run the device gets hotter and slower."""

WORTH_BYTES = 0.01
"""A setting that saves less than this share of the peak saves nothing: peaks vary by that much between runs."""

BUDGETS = (0.9, 0.7, 0.5, 0.3)  # shares of the activations, tried in this order


OUTRIGHT = "train.activation_checkpointing=true recomputes blocks at any cost"
OUT_OF_TIME = "the rest: the time for trials was used up (it is at most that of the run itself)"


@dataclass(frozen=True, kw_only=True, slots=True)
class MemorySetting:
    """One position of all levers; the default is the normal step."""

    activation_budget: float = 1.0
    recompute: Recompute = "none"
    optimizer_bits: Literal[32, 8] = 32

    def __str__(self) -> str:
        parts = [
            f"activation budget {self.activation_budget:g}" if self.activation_budget < 1 else "",
            f"recompute {self.recompute}" if self.recompute != "none" else "",
            f"{self.optimizer_bits}-bit optimizer" if self.optimizer_bits < 32 else "",
        ]
        return " + ".join(filter(None, parts)) or "normal"


NORMAL = MemorySetting()


class Cost(NamedTuple):
    """The time of a step in milliseconds, and its peak memory."""

    ms: float
    peak_bytes: int


Measure = Callable[[MemorySetting], Cost]


class CannotRun(Exception):
    """A candidate that failed, with the reason in one line."""


class DoesNotFit(CannotRun):
    """A candidate that ran out of memory."""


class NotCaptured(CannotRun):
    """A candidate that compiles, but is not a CUDA graph."""


Trials = dict[MemorySetting, Cost | str]
"""What was measured, in this order; the reason instead of the cost of what could not run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryChoice:
    """The chosen setting, what each lever saved and cost, and what was left out."""

    setting: MemorySetting
    reason: str
    trials: Trials = dataclasses.field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def format_lines(self) -> list[str]:
        return [
            f"memory low: {self.setting}, {self.reason}",
            *(f"  {setting}: {self._format_trial(found)}" for setting, found in self.trials.items()),
            *(f"  not tried: {note}" for note in self.notes),
        ]

    def _format_trial(self, found: Cost | str) -> str:
        if isinstance(found, str):
            return found
        base = _find_reference(self.trials)
        change = "" if found is base else f", {_format_change(found, base)}"
        return f"{_format_size(found)}, {found.ms:.1f} ms{change}"


def choose_memory(
    measure: Measure,
    levers: Iterable[Sequence[MemorySetting]],
    *,
    time_limit: float,
    notes: Sequence[str] = (),
    may_go_on: Callable[[], bool] = lambda: True,
) -> MemoryChoice:
    """Measure the normal step, each lever from its mildest position on, and the best of each lever together."""
    trials: Trials = {NORMAL: _try_setting(measure, NORMAL)}
    is_cut_short = False
    for lever in levers:
        num_idle = 0
        for number, setting in enumerate(lever, 1):
            if not may_go_on():
                is_cut_short = True
                break
            trials[setting] = _try_setting(measure, setting)
            is_slow = _is_too_slow(setting, trials, time_limit)
            num_idle = num_idle + 1 if _saves_nothing(setting, trials) else 0
            # Each further setting takes longer. After two in a row that save nothing, the lever does not affect this
            # model.
            if (left := lever[number:]) and (is_slow or num_idle == 2):
                end = "is too slow" if is_slow else "saves nothing"
                notes = (*notes, f"{', '.join(map(str, left))}: {setting} already {end}")
                break
    together = _combine_levers(trials, time_limit)
    if together is not None and may_go_on():
        trials[together] = _try_setting(measure, together)
    elif together is not None or is_cut_short:
        notes = (*notes, OUT_OF_TIME)
    return _choose_setting(trials, time_limit, notes)


def _choose_setting(trials: Trials, time_limit: float, notes: Sequence[str] = ()) -> MemoryChoice:
    """Return the setting with the least memory within the time limit."""
    base, normal = _find_reference(trials), trials[NORMAL]
    ran = {setting: found for setting, found in trials.items() if isinstance(found, Cost)}
    fitting = [setting for setting, cost in ran.items() if cost.ms <= time_limit * base.ms]
    best = min(fitting, key=lambda setting: (ran[setting].peak_bytes, ran[setting].ms))
    cost = ran[best]
    if isinstance(normal, str):
        reason = f"{_format_size(cost)} at {cost.ms:.1f} ms: the normal step does not fit ({normal})"
    elif best == NORMAL or _saves_nothing(best, trials):
        best, reason = NORMAL, f"nothing lowers the peak of {_format_size(base)} within +{time_limit - 1:.0%} time"
        reason += _describe_refused(ran, trials, time_limit)
    else:
        reason = f"{_format_size(cost)} instead of {_format_size(base)}, {_format_change(cost, base)}"
    return MemoryChoice(setting=best, reason=reason, trials=trials, notes=tuple(notes))


def _try_setting(measure: Measure, setting: MemorySetting) -> Cost | str:
    try:
        return measure(setting)
    except torch.OutOfMemoryError:
        return "ran out of memory"
    except CannotRun as error:
        return str(error)


def _is_too_slow(setting: MemorySetting, trials: Trials, time_limit: float) -> bool:
    found, normal = trials[setting], trials[NORMAL]
    return isinstance(found, Cost) and isinstance(normal, Cost) and found.ms > time_limit * normal.ms


def _saves_nothing(setting: MemorySetting, trials: Trials) -> bool:
    found, normal = trials[setting], trials[NORMAL]
    if isinstance(found, str) or isinstance(normal, str):
        return False
    return found.peak_bytes > (1 - WORTH_BYTES) * normal.peak_bytes


def _combine_levers(trials: Trials, time_limit: float) -> MemorySetting | None:
    """Combine the best activation lever with the 8-bit optimizer; two activation levers would affect the same
    tensors."""
    best, small = _choose_setting(trials, time_limit).setting, MemorySetting(optimizer_bits=8)
    if not isinstance(trials.get(small), Cost) or best.optimizer_bits == 8 or best == NORMAL:
        return None
    return dataclasses.replace(best, optimizer_bits=8)


def _find_reference(trials: Trials) -> Cost:
    """Return the cost to compare with: the normal step, or the fastest one if that did not fit."""
    normal = trials[NORMAL]
    if isinstance(normal, Cost):
        return normal
    ran = [found for found in trials.values() if isinstance(found, Cost)]
    if not ran:
        raise CannotRun(f"no setting could be measured: {normal}")
    return min(ran)


def _describe_refused(ran: Mapping[MemorySetting, Cost], trials: Trials, time_limit: float) -> str:
    """Describe the most that could be saved with a larger TIME_LIMIT."""
    slow = [one for one in ran if _is_too_slow(one, trials, time_limit) and not _saves_nothing(one, trials)]
    if not slow:
        return ""
    best = min(slow, key=lambda setting: ran[setting].peak_bytes)
    outright = "" if best.recompute == "none" else f" ({OUTRIGHT})"
    change = _format_change(ran[best], ran[NORMAL])
    return f"; too slow: {best} with {_format_size(ran[best])}, {change}{outright}"


def _format_size(cost: Cost) -> str:
    return format_bytes(cost.peak_bytes, digits=3)


def _format_change(cost: Cost, base: Cost) -> str:
    return f"{cost.peak_bytes / base.peak_bytes - 1:+.0%} memory, {cost.ms / base.ms - 1:+.0%} time"


# --- the levers on a real model ---


class Levers(NamedTuple):
    """Positions to try for each lever, and why others are missing."""

    positions: list[Sequence[MemorySetting]]
    notes: list[str]


def list_levers(ways: Sequence[Recompute], optimizer_name: str, moment_bits: int = 32, *, is_compiled: bool) -> Levers:
    """Return the levers, the most promising first: trials may run out of time. `ways` lists how the model may
    recompute."""
    positions: list[Sequence[MemorySetting]] = []
    notes: list[str] = []
    if ways:
        positions.append([MemorySetting(recompute=how) for how in ways])
    if optimizer_name == "adamw" and moment_bits == 32:
        positions.append((MemorySetting(optimizer_bits=8),))
    elif optimizer_name != "adamw":
        notes.append(f"8-bit optimizer states: they exist for adamw, not for {optimizer_name}")
    if is_compiled:
        positions.append([MemorySetting(activation_budget=share) for share in BUDGETS])
    else:
        notes.append("activation budget: it needs train.fast=compile or graph")
    return Levers(positions, notes)


def sort_by_peak(
    levers: Sequence[Sequence[MemorySetting]], peak: Callable[[MemorySetting], int | None]
) -> list[Sequence[MemorySetting]]:
    """Sort levers by what their mildest setting is predicted to save, since time for trials may run out. Levers without
    a prediction keep their order after the others."""
    return sorted(levers, key=lambda lever: math.inf if (predicted := peak(lever[0])) is None else predicted)


def make_optimizer(
    setting: MemorySetting,
    name: str,
    groups: ParamGroups,
    *,
    lr: float,
    options: Options | None = None,
    rounding: Rounding = "split",
    seed: int = 0,
) -> Optimizer:
    """Build the run's optimizer with moments in the setting's bits; `rounding` is that of bf16 weights."""
    if setting.optimizer_bits == 8:
        return AdamW8bit(groups, lr=lr, rounding=rounding, seed=seed, **dict(options or {}))
    if name == "adamw" and any(is_kept_in_half(p) for group in groups for p in group["params"]):
        return AdamWBf16(groups, lr=lr, rounding=rounding, seed=seed, **dict(options or {}))
    return build_optimizer(name, groups, lr=lr, options=options)


TIMED_STEPS = 5  # least steps of a round; fewer if the time for trials is short
LASTING_ROUNDS = 6
"""On a GPU a round has so many steps that this many fill the time: at its end the device waits for the host, and rests,
which it does not in a run."""
ROUNDS = 3  # the median of at least this many rounds counts: the first may have a cold cache
LASTING_S = 1.5
"""On a GPU rounds go on for so long, and the last two thirds count: at its power cap an H200 took longer for a step
after half a second than before (benchmarks/NOTES.md)."""


def time_lasting_step(a_round: Callable[[int], float], time: TrialTime, lasting_s: float) -> float:
    """Return the seconds of a step under sustained load: the median over rounds. `a_round` runs a number of steps and
    returns the seconds of one. If time is short, rounds are fewer and shorter."""
    once_s = max(a_round(1), 1e-9)
    if time.run_s is None:
        time.expect(once_s)
    affordable_s = time.for_one_s
    affordable = affordable_s / once_s
    wanted = max(TIMED_STEPS, lasting_s / LASTING_ROUNDS / once_s)
    num_steps = max(1, int(min(wanted, affordable / ROUNDS)))
    until = time.clock() + min(lasting_s, affordable_s)
    rounds = [a_round(num_steps)]
    while not time.is_over and (len(rounds) < min(ROUNDS, affordable / num_steps) or time.clock() < until):
        rounds.append(a_round(num_steps))
    return statistics.median(rounds[-max(ROUNDS, 2 * len(rounds) // 3) :])


class Steps(Protocol):
    """The interface of an engine that runs the steps of a trial."""

    @property
    def mode(self) -> Mode: ...

    def __call__(self, window: list[Batch]) -> object: ...
    def forget_graphs(self) -> None: ...


class Rehearsed(Protocol):
    """The parts of an assembled copy of a run that a trial uses."""

    name: str
    train: TrainConfig
    plan: Plan
    model: nn.Module
    device: torch.device
    step: GuardedStep | PhasedStep


class Rehearsal(Protocol):
    """Assembles copies of a run for trials. Passed in, because this package does not build runs."""

    @property
    def config(self) -> RunConfig: ...
    @property
    def workload(self) -> Workload: ...

    def begin(self, plan: Plan, **changes: Mapping[str, Any]) -> AbstractContextManager[Trial]:
        """Assemble a copy for one trial; `changes` are other settings, by section."""


def measure_cost(mode: Mode, plan: Plan, rehearsal: Rehearsal, **changes: Mapping[str, Any]) -> Cost:
    """Return the cost of a step in this mode, or compiled if it cannot be captured, as the run itself would
    continue."""
    try:
        return _measure_in(mode, plan, rehearsal, changes)
    except NotCaptured:
        pass  # retry outside of the handler: the error's frames hold the model
    return _measure_in("compile", plan, rehearsal, changes)


def _measure_in(mode: Mode, plan: Plan, rehearsal: Rehearsal, changes: Mapping[str, Mapping[str, Any]]) -> Cost:
    with rehearsal.begin(plan, **changes) as trial:
        return trial.measure(mode)


class Trial:
    """Steps on a copy of the model, always with the same batch; each measurement runs in a fresh thread."""

    def __init__(self, parts: Rehearsed, engine: Callable[[Any, Mode, Notice], Steps], batch: Batch) -> None:
        self.parts, self.engine = parts, engine
        self.window = [{name: value.to(parts.device) for name, value in batch.items()}] * parts.step.accumulate
        self.announce: Callable[[], object] = lambda: None
        """Called before each measurement: all of them together may take longer than other ranks wait for a message."""

    def measure(self, mode: Mode, time: TrialTime | None = None, *, cudnn_benchmark: bool | None = None) -> Cost:
        """Return milliseconds and peak bytes of a step in this mode; raise CannotRun if it does not run."""
        self.announce()
        if cudnn_benchmark is not None:
            self.parts.plan = dataclasses.replace(self.parts.plan, cudnn_benchmark=cudnn_benchmark)
        return run_in_fresh_thread(lambda: self._measure(mode, time or TrialTime()), self.parts.device)

    def _measure(self, mode: Mode, time: TrialTime) -> Cost:
        if mode == "graph" and (reason := self.parts.step.why_never_captured()):
            raise NotCaptured(reason)

        def ended(text: str, level: Level) -> None:
            if engine.mode != mode:  # stop before it compiles in another mode
                raise (NotCaptured if engine.mode == "compile" else CannotRun)(text)

        engine = self.engine(self.parts, mode, ended)
        try:
            peak = self._warm_up(engine, time)
            found = Cost(self._time_steps(engine, time) * 1e3, peak)
        except torch.OutOfMemoryError as error:
            raise DoesNotFit("out of memory") from error
        except CannotRun:
            raise
        except Exception as error:
            if mode == "eager" and not is_only_tried(self.parts.train.channels_last, self.parts.name, self.parts.plan):
                raise  # the run itself would fail with it
            raise CannotRun(f"{type(error).__name__}: {summarise_error(error)}") from error
        finally:
            engine.forget_graphs()
        return found

    def _warm_up(self, engine: Steps, time: TrialTime) -> int:
        """Run enough steps for compilation, first commits and capture; return the peak of the last two, with the
        graph."""
        device = self.parts.device
        with time.count_start():
            engine(self.window)
            wait_for(self.parts.device)
        for _ in range(UNCAPTURED - 2):
            engine(self.window)
        if device.type != "cuda":
            with LiveBytes() as live:
                engine(self.window)
            return int(live.peak)
        wait_for(device)
        reset_peak(device)
        for _ in range(2):
            engine(self.window)
        return get_peak_memory_bytes(device) or 0

    def _time_steps(self, engine: Steps, time: TrialTime) -> float:
        def time_round(num_steps: int) -> float:
            start = time.clock()
            for _ in range(num_steps):
                engine(self.window)
            wait_for(self.parts.device)
            return (time.clock() - start) / num_steps

        wait_for(self.parts.device)
        return time_lasting_step(time_round, time, LASTING_S if self.parts.device.type == "cuda" else 0.0)


def load_first_batch(train: TrainConfig, workload: Workload) -> Batch:
    """Load the first training batch, on the host."""
    with closing(Loader(workload.train_samples, batch_size=train.batch_size, seed=train.seed, shuffle=True)) as loader:
        return next(loader.iterate_epoch(0))


# --- the time limit of trials: at most a minute, and at most a twentieth of the expected run ---
#
# Two accounts:
#     starts   the first step of each candidate, in which code is compiled and cuDNN tries its algorithms. It cannot be
#              interrupted, so its usual duration is considered before: all starts together must fit into a twentieth of
#              the run. A run in that mode would begin with it anyway, and compiled code is cached on disk.
#     steps    everything else, limited by the clock: asked before each candidate, and for how many steps one is timed.


MOST_S = 60.0
SHARE = 0.05  # of the expected run that trials may take
CANDIDATES = 4
"""A candidate is timed for at most a fourth of the time: the first must not use up what the others need."""


class TrialTime:
    """The time that trials have used and may still use."""

    def __init__(
        self, num_steps: float = math.inf, *, most_s: float = math.inf, clock: Clock = time.perf_counter
    ) -> None:
        self.num_steps, self.most_s, self.clock = num_steps, most_s, clock
        self.run_s: float | None = None  # expected time of the run; None before anything was timed
        self.starts_s = 0.0
        self._total = Stopwatch(clock=clock)

    def expect(self, step_s: float) -> None:
        """Set the expected time of the run from the time of a step."""
        self.run_s = step_s * self.num_steps

    @property
    def limit_s(self) -> float:
        return self.most_s if self.run_s is None else min(self.most_s, SHARE * self.run_s)

    @property
    def spent_s(self) -> float:
        """Return the time spent on everything but the candidates' starts."""
        return self._total.elapsed_s - self.starts_s

    @property
    def is_over(self) -> bool:
        return self.spent_s >= self.limit_s

    @property
    def for_one_s(self) -> float:
        """Return the time for which one candidate may be timed, starting now."""
        return max(0.0, min(self.limit_s / CANDIDATES, self.limit_s - self.spent_s))

    def has_room_for(self, start_s: float) -> bool:
        """True if a start that usually takes this long fits into the run's share, with the starts before it.

        A candidate without a start always fits: a slow start before it is no reason to leave it out.
        """
        return start_s == 0 or self.run_s is None or self.starts_s + start_s <= SHARE * self.run_s

    @contextmanager
    def count_start(self) -> Iterator[None]:
        start = Stopwatch(clock=self.clock)
        try:
            yield
        finally:
            self.starts_s += start.elapsed_s


def count_total_steps(train: TrainConfig, num_batches: int) -> int:
    """Return the number of steps of the run, if nothing stops it early."""
    planned = train.epochs * math.ceil(num_batches / train.accumulate)
    return min(planned, train.max_steps) if train.max_steps else planned
