"""`train.fast: auto`: candidates in order, each timed against the best before it, until the time for trials is over.

    eager in both memory layouts      the first one tells how long the run will be
    graph, compile                    in the better layout; a captured step is the likeliest to win, so it comes first
    cudnn.benchmark                   on top of the fastest so far
    kernel tuning                     on top of that: the code is compiled again

What is left untried is named in the reason, and whether the clock or the length of the run forbade it.
"""

from __future__ import annotations

import dataclasses
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from halfstep.config.schema import RunConfig
from halfstep.precision.plan import Plan
from halfstep.precision.row import Gain
from halfstep.tune.layout import convolves_images, wants_channels_last
from halfstep.tune.memory_low import CannotRun, Cost, DoesNotFit, NotCaptured
from halfstep.tune.modes import COMPILE_S, CUDNN_TRIALS_S, KERNEL_TUNING_S, Mode, has_convolutions
from halfstep.tune.trial_time import TrialTime
from halfstep.tune.trials import Rehearse, Trial
from halfstep.workloads.base.workload import Workload

WORTH = 1.02  # a mode must be this much faster to be preferred to a simpler one: trials differ by that much
WORTH_SEARCHING = 1.01
"""What cuDNN's own trials must gain, and over the run more than they take: nothing else changes by them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundMode:
    fields: dict[str, Any]  # of the plan
    eager_ms: float | None  # None where the eager step does not fit
    ms: float
    run_s: float  # what the run was expected to take when this was decided
    untried: tuple[str, ...]
    is_final: bool  # whether it holds for other runs too: what a short run had no time to compile for says nothing


class ModeSearch:
    def __init__(self, config: RunConfig, workload: Workload, plan: Plan, time: TrialTime, rehearse: Rehearse) -> None:
        self.config, self.workload, self.plan, self.time, self.rehearse = config, workload, plan, time, rehearse
        self.fields: dict[str, Any] = {
            "mode": "eager",
            "channels_last": wants_channels_last(config, plan, *workload.modules()),
            "tunes_kernels": config.train.tune_kernels is True,
            "cudnn_benchmark": False,
        }
        self.costs: dict[str, Cost] = {}
        self.gains: list[Gain] = []
        self.problems: list[str] = []
        self.compiles = True  # until something failed otherwise than for want of memory or of a capture
        self.out_of_time: list[str] = []
        self.too_short_for: list[str] = []

    def found(self) -> FoundMode:
        eager = self._eager()
        with self._trial() as trial:
            best = self._compiled(trial, eager)
            best = self._with_cudnn_trials(trial, best)
        best = self._with_tuned_kernels(best)
        factor = [f"{eager.ms / best.ms:.2f}x eager"] if eager and best and best is not eager else []
        costs = ", ".join(f"{label} {cost.ms:.1f} ms" for label, cost in self.costs.items())
        reason = "; ".join([costs or "nothing could be measured", *factor, *self._remarks()])
        gains = tuple(_with_outcome(gain, self.fields) for gain in self.gains)
        return FoundMode(
            fields={**self.fields, "mode_reason": reason, "gains": gains},
            eager_ms=eager.ms if eager else None,
            ms=best.ms if best else 0.0,
            run_s=self.time.run_s or 0.0,
            untried=(*self.out_of_time, *self.too_short_for),
            is_final="compile" in self.costs or "graph" in self.costs,
        )

    # --- candidates ---

    def _eager(self) -> Cost | None:
        """The eager step in the usual layout, and in the other where that is left open; the faster one is found."""
        usual = self.fields["channels_last"]
        is_open = self.config.train.channels_last == "auto" and convolves_images(*self.workload.modules())
        layouts = (usual, not usual) if is_open else (usual,)
        tried: dict[bool, Cost] = {}
        for channels_last in layouts:
            label = "eager" if channels_last or not is_open else "eager NCHW"
            if channels_last != usual and not self._may_try(label):
                continue
            with self._trial(channels_last=channels_last) as trial:
                cost = self._tried(trial, "eager", label)
            if cost is not None:
                tried[channels_last] = cost
                if len(tried) == 1:
                    self.time.expect(cost.ms / 1e3)
        if not tried:
            return None
        self.fields["channels_last"] = _faster_layout(tried, usual)
        if len(tried) == 2:
            self._note("channels_last", tried[False], tried[True])
        return tried[self.fields["channels_last"]]

    def _compiled(self, trial: Trial, eager: Cost | None) -> Cost | None:
        if not self._may_try("graph", COMPILE_S):
            return eager
        captured = self._tried(trial, "graph")
        # Without a graph it is the mode that is left, and most of its code is there. With one it may compile again.
        start_s = COMPILE_S if captured else 0.0
        compiled = self._tried(trial, "compile") if self.compiles and self._may_try("compile", start_s) else None
        if eager and compiled:
            self._note("compile", eager, compiled)
        simpler = compiled or eager
        if captured and simpler:
            self._note("graph", simpler, captured)
        if not self.costs:
            return None
        self.fields["mode"] = fastest_mode(self.costs)
        return {"eager": eager, "compile": compiled, "graph": captured}[self.fields["mode"]]

    def _with_cudnn_trials(self, trial: Trial, best: Cost | None) -> Cost | None:
        if best is None or not self.plan.on_cuda or not has_convolutions(self.workload.model):
            return best
        if not self._may_try("cudnn.benchmark", CUDNN_TRIALS_S):
            return best
        mode: Mode = self.fields["mode"]
        cost = self._tried(trial, mode, f"{mode} + cudnn.benchmark", cudnn_benchmark=True)
        return self._better(best, cost, "cudnn.benchmark", "cudnn_benchmark", WORTH_SEARCHING, CUDNN_TRIALS_S)

    def _with_tuned_kernels(self, best: Cost | None) -> Cost | None:
        mode: Mode = self.fields["mode"]
        if best is None or mode == "eager" or self.config.train.tune_kernels != "auto":
            return best
        if not self._may_try("kernel tuning", KERNEL_TUNING_S):
            return best
        with self._trial(tunes_kernels=True) as trial:
            cost = self._tried(trial, mode, f"{mode} + kernel tuning")
        return self._better(best, cost, "kernel tuning", "tunes_kernels")

    # --- one candidate ---

    def _may_try(self, label: str, start_s: float = 0.0) -> bool:
        """What the first step of a candidate usually takes must fit into the run; then the clock is asked."""
        if not self.time.has_room_for(start_s):
            self.too_short_for.append(label)
        elif self.time.is_over:
            self.out_of_time.append(label)
        else:
            return True
        return False

    def _trial(self, **changed: bool) -> AbstractContextManager[Trial]:
        mode_independent = {name: value for name, value in {**self.fields, **changed}.items() if name != "mode"}
        return self.rehearse(self.config, self.workload, dataclasses.replace(self.plan, **mode_independent))

    def _tried(self, trial: Trial, mode: Mode, label: str = "", **switches: bool) -> Cost | None:
        try:
            cost = trial.cost(mode, self.time, **switches)
        except CannotRun as error:
            self.problems.append(f"{label or mode} not possible: {error}")
            self.compiles &= isinstance(error, DoesNotFit | NotCaptured)
            return None
        self.costs[label or mode] = cost
        return cost

    def _note(self, part: str, before: Cost, after: Cost) -> None:
        self.gains.append(Gain(part=part, before_ms=before.ms, after_ms=after.ms, is_taken=False))

    def _better(
        self, best: Cost, cost: Cost | None, part: str, field: str, worth: float = WORTH, start_s: float = 0.0
    ) -> Cost:
        if cost is None:
            return best
        self._note(part, best, cost)
        saved_s = (best.ms - cost.ms) / 1e3 * self.time.num_steps
        self.fields[field] = cost.ms * worth <= best.ms and saved_s > start_s
        return cost if self.fields[field] else best

    def _remarks(self) -> list[str]:
        found = list(self.problems)
        if "graph" in self.too_short_for:
            run_s = self.time.run_s or 0.0
            found.append(f"about {_duration(run_s)} to go is too short to compile for (train.fast=graph does)")
        else:
            found += [f"not tried, too short a run for its start: {label}" for label in self.too_short_for]
        if self.out_of_time:
            found.append(f"not tried, out of trial time: {', '.join(self.out_of_time)}")
        return [*found, f"{self.time.spent_s:.0f} s of trials and {self.time.starts_s:.0f} s of first steps"]


def _with_outcome(gain: Gain, fields: dict[str, Any]) -> Gain:
    """Whether the part is in what runs is known at the end only."""
    taken = {
        "channels_last": fields["channels_last"],
        "compile": fields["mode"] != "eager",
        "graph": fields["mode"] == "graph",
        "cudnn.benchmark": fields["cudnn_benchmark"],
        "kernel tuning": fields["tunes_kernels"],
    }
    return dataclasses.replace(gain, is_taken=taken[gain.part])


def _faster_layout(tried: dict[bool, Cost], usual: bool) -> bool:
    if len(tried) == 1:
        return next(iter(tried))
    return not usual if tried[not usual].ms * WORTH < tried[usual].ms else usual


def fastest_mode(costs: dict[str, Cost]) -> Mode:
    """The simplest of the modes that are as fast as the fastest; eager counts in its better layout."""
    eager = [cost for label, cost in costs.items() if label.startswith("eager")]
    modes: dict[Mode, Cost] = {"eager": min(eager)} if eager else {}
    modes |= {mode: costs[mode] for mode in ("compile", "graph") if mode in costs}
    limit = min(cost.ms for cost in modes.values()) * WORTH
    return next(mode for mode, cost in modes.items() if cost.ms <= limit)


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"
