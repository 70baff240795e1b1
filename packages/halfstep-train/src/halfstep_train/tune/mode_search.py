"""`train.fast: auto`: time candidates in order, each against the best so far, until the time for trials is over.

    eager in both memory layouts      the first one shows how long the run will take
    graph, compile                    in the better layout; a captured step is the likeliest to win, so it comes first
    cudnn.benchmark                   on top of the fastest so far
    kernel tuning                     on top of that: the code is compiled again

The recorded reason lists what was not tried, and whether the time for trials or the length of the run prevented it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from halfstep import __version__
from halfstep.disk import find_cache_directory
from halfstep.errors import format_duration
from halfstep.hardware.cache import read_json, write_json
from halfstep.precision.plan import Gain, Plan
from halfstep_train.tune.channels_last import convolves_images, wants_channels_last
from halfstep_train.tune.modes import (
    COMPILE_S,
    CUDNN_TRIALS_S,
    KERNEL_TUNING_S,
    WARM_START_S,
    Mode,
    has_convolutions,
)
from halfstep_train.tune.trials import CannotRun, Cost, DoesNotFit, NotCaptured, Rehearsal, Trial, TrialTime
from halfstep_train.workloads import KINDS

WORTH = 1.02  # a mode must be this much faster to be preferred to a simpler one: the noise of trials
WORTH_SEARCHING = 1.01
"""The least gain for which cuDNN's own trials are used; over the run they must also gain more than they take."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundMode:
    """The result of a search, as stored on disk."""

    fields: dict[str, Any]  # of the plan
    eager_ms: float | None  # None if the eager step does not fit
    ms: float
    run_s: float  # what the run was expected to take when this was decided
    untried: tuple[str, ...]
    is_final: bool  # whether it also holds for other runs: a short run has no time to compile


class ModeSearch:
    """One search over candidates, with the best fields so far, the costs measured, and what was left out."""

    def __init__(self, plan: Plan, time: TrialTime, rehearsal: Rehearsal) -> None:
        self.plan, self.time, self.rehearsal = plan, time, rehearsal
        self.train, self.workload = rehearsal.config.train, rehearsal.workload
        layout = self.train.channels_last, rehearsal.config.workload, plan
        self.fields: dict[str, Any] = {
            "mode": "eager",
            "channels_last": wants_channels_last(*layout, *self.workload.list_modules()),
            "tunes_kernels": self.train.tune_kernels is True,
            "cudnn_benchmark": False,
        }
        self.costs: dict[str, Cost] = {}
        self.gains: list[Gain] = []
        self.problems: list[str] = []
        self.compiles = True  # until a candidate fails for another reason than memory or capture
        self.out_of_time: list[str] = []
        self.too_short_for: list[str] = []

    def search(self) -> FoundMode:
        eager = self._try_eager()
        with self._start_trial() as trial:
            best = self._try_compiled(trial, eager)
            best = self._try_cudnn_trials(trial, best)
        best = self._try_tuned_kernels(best)
        factor = [f"{eager.ms / best.ms:.2f}x eager"] if eager and best and best is not eager else []
        costs = ", ".join(f"{label} {cost.ms:.1f} ms" for label, cost in self.costs.items())
        reason = "; ".join([costs or "nothing could be measured", *factor, *self._list_remarks()])
        return FoundMode(
            fields={**self.fields, "mode_reason": reason, "gains": tuple(self.gains)},
            eager_ms=eager.ms if eager else None,
            ms=best.ms if best else 0.0,
            run_s=self.time.run_s or 0.0,
            untried=(*self.out_of_time, *self.too_short_for),
            is_final="compile" in self.costs or "graph" in self.costs,
        )

    # --- candidates ---

    def _try_eager(self) -> Cost | None:
        """Time the eager step in the usual layout, and in the other if it is not fixed; keep the faster one."""
        usual = self.fields["channels_last"]
        is_open = self.train.channels_last == "auto" and convolves_images(*self.workload.list_modules())
        layouts = (usual, not usual) if is_open else (usual,)
        tried: dict[bool, Cost] = {}
        for channels_last in layouts:
            label = "eager" if channels_last or not is_open else "eager NCHW"
            if channels_last != usual and not self._may_try(label):
                continue
            with self._start_trial(channels_last=channels_last) as trial:
                cost = self._measure_trial(trial, "eager", label)
            if cost is not None:
                tried[channels_last] = cost
                if len(tried) == 1:
                    self.time.expect(cost.ms / 1e3)
        if not tried:
            return None
        chosen = next(iter(tried))
        if len(tried) == 2:
            chosen = not usual if tried[not usual].ms * WORTH < tried[usual].ms else usual
            self._note("channels_last", tried[False], tried[True], is_taken=chosen)
        self.fields["channels_last"] = chosen
        return tried[chosen]

    def _try_compiled(self, trial: Trial, eager: Cost | None) -> Cost | None:
        if not self._may_try("graph", COMPILE_S):
            return eager
        captured = self._measure_trial(trial, "graph")
        # Without a graph this is the remaining mode, and most of its code exists. With one it may compile again.
        start_s = COMPILE_S if captured else 0.0
        compiled = (
            self._measure_trial(trial, "compile") if self.compiles and self._may_try("compile", start_s) else None
        )
        if not self.costs:
            return None
        mode = self.fields["mode"] = find_fastest_mode(self.costs)
        if eager and compiled:
            self._note("compile", eager, compiled, is_taken=mode != "eager")
        if captured and (simpler := compiled or eager):
            self._note("graph", simpler, captured, is_taken=mode == "graph")
        return {"eager": eager, "compile": compiled, "graph": captured}[mode]

    def _try_cudnn_trials(self, trial: Trial, best: Cost | None) -> Cost | None:
        if best is None or not self.plan.on_cuda or not has_convolutions(self.workload.model):
            return best
        if not self._may_try("cudnn.benchmark", CUDNN_TRIALS_S):
            return best
        mode: Mode = self.fields["mode"]
        cost = self._measure_trial(trial, mode, f"{mode} + cudnn.benchmark", cudnn_benchmark=True)
        return self._keep_faster(best, cost, "cudnn.benchmark", "cudnn_benchmark", WORTH_SEARCHING, CUDNN_TRIALS_S)

    def _try_tuned_kernels(self, best: Cost | None) -> Cost | None:
        mode: Mode = self.fields["mode"]
        if best is None or mode == "eager" or self.train.tune_kernels != "auto":
            return best
        if not self._may_try("kernel tuning", KERNEL_TUNING_S):
            return best
        with self._start_trial(tunes_kernels=True) as trial:
            cost = self._measure_trial(trial, mode, f"{mode} + kernel tuning")
        return self._keep_faster(best, cost, "kernel tuning", "tunes_kernels")

    # --- one candidate ---

    def _may_try(self, label: str, start_s: float = 0.0) -> bool:
        """True if a candidate's usual start fits into the run's share, and time is left."""
        if not self.time.has_room_for(start_s):
            self.too_short_for.append(label)
        elif self.time.is_over:
            self.out_of_time.append(label)
        else:
            return True
        return False

    def _start_trial(self, **changed: bool) -> AbstractContextManager[Trial]:
        mode_independent = {name: value for name, value in {**self.fields, **changed}.items() if name != "mode"}
        return self.rehearsal.begin(dataclasses.replace(self.plan, **mode_independent))

    def _measure_trial(self, trial: Trial, mode: Mode, label: str = "", **switches: bool) -> Cost | None:
        try:
            cost = trial.measure(mode, self.time, **switches)
        except CannotRun as error:
            self.problems.append(f"{label or mode} not possible: {error}")
            self.compiles &= isinstance(error, DoesNotFit | NotCaptured)
            return None
        self.costs[label or mode] = cost
        return cost

    def _note(self, part: str, before: Cost, after: Cost, *, is_taken: bool) -> None:
        self.gains.append(Gain(part=part, before_ms=before.ms, after_ms=after.ms, is_taken=is_taken))

    def _keep_faster(
        self, best: Cost, cost: Cost | None, part: str, field: str, worth: float = WORTH, start_s: float = 0.0
    ) -> Cost:
        if cost is None:
            return best
        saved_s = (best.ms - cost.ms) / 1e3 * self.time.num_steps
        self.fields[field] = cost.ms * worth <= best.ms and saved_s > start_s
        self._note(part, best, cost, is_taken=self.fields[field])
        return cost if self.fields[field] else best

    def _list_remarks(self) -> list[str]:
        found = list(self.problems)
        if "graph" in self.too_short_for:
            run_s = self.time.run_s or 0.0
            found.append(f"too short for compiling: about {format_duration(run_s)} to go (train.fast=graph compiles)")
        else:
            found += [f"not tried, the run is too short for its start-up: {label}" for label in self.too_short_for]
        if self.out_of_time:
            found.append(f"not tried, out of trial time: {', '.join(self.out_of_time)}")
        return [*found, f"{self.time.spent_s:.0f} s of trials and {self.time.starts_s:.0f} s of first steps"]


def find_fastest_mode(costs: dict[str, Cost]) -> Mode:
    """Return the simplest mode that is as fast as the fastest; eager counts with its better layout."""
    eager = [cost for label, cost in costs.items() if label.startswith("eager")]
    modes: dict[Mode, Cost] = {"eager": min(eager)} if eager else {}
    modes |= {mode: costs[mode] for mode in ("compile", "graph") if mode in costs}
    limit = min(cost.ms for cost in modes.values()) * WORTH
    return next(mode for mode, cost in modes.items() if cost.ms <= limit)


# --- results of a search, kept on disk for the next run of the same model, shapes, device and versions ---
#
# A cached mode is used if it pays: its steps must save more time over the run than its start takes, with compiled code
# from the compiler's cache.


MUCH_LONGER = 2.0  # a run longer by this factor than the one that measured tries what that one left out


class CachedMode:
    """The stored result for one model, shapes, device and versions."""

    def __init__(self, plan: Plan, rehearsal: Rehearsal) -> None:
        config, workload = rehearsal.config, rehearsal.workload
        train, optimizer = config.train, config.optimizer
        rows = (*plan.rows, *plan.frozen)
        identity = (
            "\n".join(map(str, (workload.model, *(part.module for part in workload.frozen.values())))),
            [train.batch_size, train.accumulate, config.data.image_size],
            KINDS.of(config.workload).describe_sample_size(config),
            [optimizer.name, optimizer.moment_bits, config.precision.rounding, config.ema.enabled],
            [train.channels_last, train.tune_kernels, train.activation_checkpointing],
            [plan.granted, plan.device_name, [(row.module, row.compute) for row in rows if row.is_part]],
            [__version__, torch.__version__, torch.version.cuda, torch.backends.cudnn.version()],
        )
        name = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16]
        self.path: Path = find_cache_directory() / f"mode-{name}.json"

    def read(self) -> FoundMode | None:
        try:
            stored = read_json(self.path)
            fields = stored.pop("fields")
            fields["gains"] = tuple(Gain(**gain) for gain in fields["gains"])
            return FoundMode(**{**stored, "fields": fields, "untried": tuple(stored["untried"])})
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            return None  # no usable file: measure again

    def write(self, found: FoundMode) -> str:
        """Write the result; return an empty string, or why it could not be written."""
        return write_json(self.path, dataclasses.asdict(found))

    def choose_for_run(self, num_steps: int) -> dict[str, Any] | None:
        """Return the plan's fields for a run of this many steps; None if they have to be measured."""
        found = self.read()
        if found is None:
            return None
        expected_s = (found.eager_ms or found.ms) / 1e3 * num_steps
        if found.untried and expected_s > MUCH_LONGER * found.run_s:
            return None
        # Without an eager step no other mode runs.
        saved_s = math.inf if found.eager_ms is None else (found.eager_ms - found.ms) / 1e3 * num_steps
        start_s = 0.0 if found.fields["mode"] == "eager" else WARM_START_S
        start_s += CUDNN_TRIALS_S if found.fields["cudnn_benchmark"] else 0.0
        fields = {**found.fields, "mode_reason": f"measured before: {found.fields['mode_reason']}"}
        if start_s <= saved_s:
            return fields
        reason = (
            f"{found.fields['mode']} would save {saved_s:.0f} s of this run and take about {start_s:.0f} s to start"
        )
        plain = {"mode": "eager", "tunes_kernels": False, "cudnn_benchmark": False, "gains": ()}
        return {**fields, **plain, "mode_reason": f"{reason} ({fields['mode_reason']})"}
