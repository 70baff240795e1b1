"""`train.memory: low`: less memory for a little time, chosen by measurement.

Levers, each tried alone and then the best of each kind together:

    activation budget   inductor recomputes what is cheapest until this share of the activations is left (compiled only)
    recompute           pointwise: keep only outputs of matmuls and convolutions; blocks: keep only the blocks' inputs;
                        alternate: both in turn
    optimizer bits      8: AdamW's two moments in a quarter of their bytes

The least memory wins among the settings that take at most TIME_LIMIT times the normal step's time. This module
decides; the measuring function is passed in.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch.optim import Optimizer

from halfstep.errors import format_bytes
from halfstep.recompute import Recompute
from halfstep.step.optim.adamw8bit import AdamW8bit
from halfstep.step.optim.adamw_bf16 import AdamWBf16
from halfstep.step.optim.by_name import Options, ParamGroups, build_optimizer
from halfstep.step.optim.half_weights import Rounding, is_kept_in_half

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
                notes = (*notes, f"{', '.join(map(str, left))}: {setting} {end} already")
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
