"""A replay on the CPU, for tests of the fast path: it runs the captured code again, on static inputs.

Like a CUDA graph it knows nothing of the user's Python: what was read while it was captured stays as it was."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from halfstep.fast import compiled_trial, tuned_trial
from halfstep.fast import fast_path as fast
from halfstep.fast.certificate import StepState
from halfstep.step.facts import Facts
from halfstep.step.graph import list_tables, run_nothing
from halfstep.step.step import GuardedStep, LossFn


class StandIn:
    commits = True

    def __init__(self, step: GuardedStep, loss_fn: LossFn, window: list[dict[str, Tensor]], pool: Any) -> None:
        self.step, self.loss_fn, self.generation, self.tables = step, loss_fn, step.generation, list_tables(step)
        self.inputs = [{name: value.clone() for name, value in batch.items()} for batch in window]

        def try_once() -> None:
            if self.commits:
                step.commit_on_device(step.forward_backward(loss_fn, self.inputs))
            else:
                step.accumulate_gradients(loss_fn, self.inputs, step.find_trained_parameters())

        state = StepState(step)
        before = state.copy()
        state.run_from(before, try_once)
        state.restore(before)
        step.forget_capture()

    def copy_inputs(self, window: list[dict[str, Tensor]]) -> None:
        for own, batch in zip(self.inputs, window, strict=True):
            for name, value in batch.items():
                own[name].copy_(value)

    @property
    def is_valid(self) -> bool:
        same = all(own is now for own, now in zip(self.tables, list_tables(self.step), strict=True))
        return self.generation == self.step.generation and same

    def __call__(
        self, window: list[dict[str, Tensor]], ids: tuple[Tensor, ...] = (), fill: Any = lambda: None
    ) -> Facts:
        self.copy_inputs(window)
        facts = self.step.compute(self.loss_fn, self.inputs)
        fill()
        facts.ids = ids
        self.step.commit(facts)
        return facts


class BackwardStandIn(StandIn):
    """Runs forward and backward on static inputs; verdict and commit follow."""

    commits = False

    def __call__(
        self, window: list[dict[str, Tensor]], ids: tuple[Tensor, ...] = (), fill: Any = lambda: None
    ) -> Facts:
        def replay(*_: Any) -> Any:
            found = self.replay_gradients(window)
            fill()
            return found

        facts = self.step.compute(run_nothing, window, replay)
        facts.ids = ids
        self.step.commit(facts)
        return facts

    def replay_gradients(self, window: list[dict[str, Tensor]]) -> Any:
        self.copy_inputs(window)
        return self.step.accumulate_gradients(self.loss_fn, self.inputs, self.step.find_trained_parameters())


def try_compiled_code_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Try compiled code from the first replay on, with torch's kernels in place of Inductor's. It is always faster, and
    it is not tuned."""
    monkeypatch.setattr(compiled_trial, "COMPILED", "aten")
    monkeypatch.setattr(fast, "LOOK_EVERY", 1)
    monkeypatch.setattr(compiled_trial, "COMPILE_S", -1.0)
    monkeypatch.setattr(compiled_trial, "COMPILE_S_PER_NODE", 0.0)
    monkeypatch.setattr(tuned_trial, "LIKELY_SAVING", 0.0)
    seconds = itertools.cycle([2.0, 1.0])
    monkeypatch.setattr(compiled_trial, "time_replays", lambda replay, device: next(seconds))


@contextlib.contextmanager
def replays_on_cpu() -> Iterator[None]:
    fast.CAPTURES["cpu"] = StandIn, BackwardStandIn
    share = fast.COMPARE_SHARE
    fast.COMPARE_SHARE = float("inf")  # comparisons take as long as they take: a test must not depend on the clock
    try:
        yield
    finally:
        fast.COMPARE_SHARE = share
        del fast.CAPTURES["cpu"]
        torch._dynamo.reset()
