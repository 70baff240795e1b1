"""Networks that train in turn, such as a GAN's: a guarded step for each phase, and one iteration around them.

    facts = {name: step.steps[name](loss_fn, window)}   each phase that is due: its own verdict, its own commit
    step.close(facts)                                   the iteration: loss scale and counters, on the device

A phase that is bad is dropped alone. Each step guards the buffers of the whole model: the forward pass of one network
may run another, and write its BatchNorm statistics. A `PhasedStep` looks like a `Step` to other code: it counts
(iterations), and has an average, a scaler and a state.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from halfstep.errors import CheckpointError
from halfstep.step.batches import Batch, Window
from halfstep.step.ema import Ema
from halfstep.step.facts import Facts, PhasedFacts, Reading, split_phases
from halfstep.step.guard import CONTINUE, COUNTERS, Action, Guard, GuardOptions, Verdict
from halfstep.step.scaler import Scaler
from halfstep.step.step import Accumulate, GuardedStep, LossFn
from halfstep.step.step_state import collect_state, load_state, refuse_unfit


class PhaseStep(GuardedStep):
    """A step that trains its own parameters only: all others of the model get no gradients while it runs."""

    def forward_backward(self, loss_fn: LossFn, window: Window, replay: Accumulate | None = None) -> Facts:
        with freeze_others(self.model, self.find_trained_parameters()):
            return super().forward_backward(loss_fn, window, replay)


@contextmanager
def freeze_others(model: nn.Module, trained: Iterable[Tensor]) -> Iterator[None]:
    """Switch `requires_grad` off for all other parameters, so that autograd, eager or compiled, skips them."""
    own = {id(parameter) for parameter in trained}
    others = [p for p in model.parameters() if p.requires_grad and id(p) not in own]
    for parameter in others:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in others:
            parameter.requires_grad_(True)


class Averages:
    """The averages of all phases as one: each moves when its own phase commits."""

    def __init__(self, own: Sequence[Ema]) -> None:
        self.own = own

    @contextmanager
    def swap_in(self) -> Iterator[None]:
        with ExitStack() as all_of_them:
            for average in self.own:
                all_of_them.enter_context(average.swap_in())
            yield

    def state_dict(self) -> dict[str, Tensor]:
        return {name: value for average in self.own for name, value in average.state_dict().items()}

    def restart(self) -> dict[str, Tensor]:
        return {name: value for average in self.own for name, value in average.restart().items()}


class PhasedStep:
    def __init__(self, steps: Mapping[str, GuardedStep], scaler: SharedScaler) -> None:
        self.steps, self.scaler = dict(steps), scaler
        first = next(iter(self.steps.values()))
        self.accumulate, self.device = first.accumulate, first.device
        averages = [step.ema for step in self.steps.values() if step.ema is not None]
        self.ema = Averages(averages) if averages else None
        self.values = first.values
        self.attempted = 0  # iterations
        self.committed = torch.zeros((), dtype=torch.int64, device=self.device)  # iterations in which a phase committed
        if self.values is not None:
            self.values.follow(self)

    @property
    def optimizers(self) -> list[Optimizer]:
        return [optimizer for step in self.steps.values() for optimizer in step.optimizers]

    def windows(self, batches: Iterable[Batch]) -> Iterator[list[Batch]]:
        return next(iter(self.steps.values())).windows(batches)

    @torch.no_grad()
    def close(self, facts: Mapping[str, Facts]) -> PhasedFacts:
        """End an iteration in which these phases were due, without a wait."""
        self.committed.add_(~torch.stack([own.bad for own in facts.values()]).all())
        self.scaler.close()
        self.attempted += 1
        return PhasedFacts(self.attempted - 1, self.committed, facts)

    def why_never_captured(self) -> str:
        reasons = {name: step.why_never_captured() for name, step in self.steps.items()}
        return "; ".join(f"{name}: {reason}" for name, reason in reasons.items() if reason)

    def set_rate_factor(self, factor: float) -> None:
        for step in self.steps.values():
            step.set_rate_factor(factor)

    def describe(self) -> list[tuple[str, str, int]]:
        return [(f"{own} of {name}", *more) for name, step in self.steps.items() for own, *more in step.describe()]  # type: ignore[misc]

    def state_dict(self) -> dict[str, Any]:
        """Return what the phases share once, and the rest by phase. Waits for the device."""
        return {
            "attempted": self.attempted,
            "committed": int(self.committed),
            "scaler": self.scaler.state_dict(),
            "ema": self.ema.state_dict() if self.ema is not None else {},
            "phases": {
                name: {key: value for key, value in collect_state(step).items() if key not in ("scaler", "ema")}
                for name, step in self.steps.items()
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        parts = self._split_state(state)
        for name, step in self.steps.items():
            refuse_unfit(step, parts[name])
        for name, step in self.steps.items():
            load_state(step, parts[name])
        self.attempted = int(state["attempted"])
        self.committed.fill_(int(state["committed"]))

    def _split_state(self, state: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        stored = _get_phases(state, self.steps)
        averages = self._split_averages(state["ema"])
        return {name: {**stored[name], "scaler": state["scaler"], "ema": averages[name]} for name in self.steps}

    def _split_averages(self, stored: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
        """Split stored averages by phase; unknown names go to the first phase, which refuses them."""
        own = {name: list(step.ema.state_dict()) if step.ema is not None else [] for name, step in self.steps.items()}
        known = {key for names in own.values() for key in names}
        first = next(iter(own))
        own[first] += [key for key in stored if key not in known]
        return {name: {key: stored[key] for key in keys if key in stored} for name, keys in own.items()}


def _get_phases(state: Mapping[str, Any], own: Mapping[str, object]) -> Mapping[str, Any]:
    stored: Mapping[str, Any] = state.get("phases", {})
    if stored.keys() != own.keys():
        raise CheckpointError(
            f"the stored state has the phases {', '.join(stored) or 'none'}, not {', '.join(own)}",
            fix="resume with the workload the run was started with",
        )
    return stored


# --- the guard ---

FROM_MILDEST = (Action.CONTINUE, Action.ROLLBACK, Action.STOP)


class PhasedGuard(Guard):
    """Faults in a row are those of one phase: good steps of another must not excuse it, however seldom it runs.

    `num_skipped` counts dropped steps of all phases, `num_rollbacks` those of the run.
    """

    def __init__(self, options: GuardOptions, phases: Iterable[str], *, scaling: bool, min_scale: float) -> None:
        super().__init__(options, scaling=scaling, min_scale=min_scale)
        self.phases = {name: Guard(options, scaling=scaling, min_scale=min_scale) for name in phases}

    def judge(self, reading: Reading) -> Verdict:
        """Return the gravest verdict of all phases. Rollbacks count iterations, not a phase's steps."""
        parts = split_phases(reading)
        before = reading.committed - any(not part.is_bad for part in parts.values())
        found = [self._judge_phase(name, part, before) for name, part in parts.items()]
        self.num_skipped = sum(guard.num_skipped for guard in self.phases.values())
        return max(found, key=lambda verdict: FROM_MILDEST.index(verdict.action), default=CONTINUE)

    def _judge_phase(self, name: str, reading: Reading, committed: int) -> Verdict:
        guard = self.phases[name]
        guard.num_rollbacks = self.num_rollbacks
        verdict = guard.judge(replace(reading, committed=committed))
        return replace(verdict, reason=f"{name}: {verdict.reason}") if verdict.reason else verdict

    def acknowledge(self) -> None:
        super().acknowledge()
        for guard in self.phases.values():
            guard.acknowledge()

    def state_dict(self) -> dict[str, Any]:
        own = {name: {key: getattr(guard, key) for key in COUNTERS} for name, guard in self.phases.items()}
        return super().state_dict() | {"phases": own}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        stored = _get_phases(state, self.phases)
        super().load_state_dict(state)
        for name, guard in self.phases.items():
            guard.load_state_dict({**stored[name], "pending": []})


# --- the loss scale ---


class SharedScaler(Scaler):
    """Steps note their verdicts in flags on the device; `close` moves the scale by them.

    Every phase of an iteration runs at the same scale. It falls once where any overflowed, and counts as clean where
    one at least was judged and none overflowed.
    """

    def __init__(self, device: torch.device, **settings: Any) -> None:
        super().__init__(device, **settings)
        self.overflowed, self.judged = (torch.zeros((), dtype=torch.bool, device=device) for _ in range(2))

    @torch.no_grad()
    def update(self, overflow: Tensor, unjudged: Tensor | None = None) -> None:
        """Record the verdict of one phase, in place, so that a CUDA graph can capture it."""
        is_judged = torch.ones_like(overflow) if unjudged is None else ~unjudged
        self.overflowed.logical_or_(overflow & is_judged)
        self.judged.logical_or_(is_judged)

    @torch.no_grad()
    def close(self) -> None:
        """Move the scale by the verdicts of an iteration; do nothing without loss scaling."""
        if not self.enabled:
            return
        super().update(self.overflowed, unjudged=~self.judged)
        self.overflowed.zero_()
        self.judged.zero_()
