"""Act on the guard's verdicts: continue, roll back, or stop. For runs, hs.Step and the guards of other trainers.

Before that, the guard's observers DroppedSteps and Recorder warn of dropped steps and store them in capsules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import nn

from halfstep.distributed.sharding import get_locals
from halfstep.errors import TrainingStopped
from halfstep.step.guard import Action, Guard, Verdict
from halfstep.step.phases import PhasedStep
from halfstep.step.snapshots import Snapshots
from halfstep.step.step import GuardedStep

RUINED = 1e12
"""No weight of a model that trains is this large."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VerdictHandler:
    """Carry out the guard's decisions. The functions differ from loop to loop."""

    guard: Guard
    model: nn.Module
    step: GuardedStep | PhasedStep
    snapshots: Snapshots | None = None
    """What a rollback goes back to; None if the guard never rolls back."""
    cut_rates: Callable[[], None] = lambda: None
    """Apply the guard's factor to the learning rates of schedules, after a rollback."""
    report: Callable[[str, Verdict, int, Guard], None] = lambda text, verdict, committed, guard: None
    """Report a rollback: a sentence, the verdict, the committed steps that training went back to, and the guard."""
    save: Callable[[], str] = lambda: ""
    """Save the state before a stop, and return where, as in ", saved in PATH"."""
    suggest: Callable[[], Iterable[str]] = lambda: ()
    """Return what a user can do after a stop, in addition to the guard's advice."""

    def act_on(self, verdict: Verdict) -> None:
        """Return to go on, also after a rollback; raise TrainingStopped to stop."""
        if verdict.action is Action.CONTINUE:
            return
        self.guard.release_held()
        if verdict.action is Action.ROLLBACK and self._roll_back(verdict):
            return
        advice, is_stuck = self.guard.advice, verdict.action is Action.ROLLBACK  # no snapshot is old enough
        fix = advice.no_snapshot_fix if is_stuck else verdict.fix
        # Training that is resumed continues with the next window and counts faults from zero.
        self.guard.acknowledge()
        raise TrainingStopped(
            f"training stopped: {verdict.reason}{advice.no_snapshot_reason if is_stuck else ''}",
            why=f"these steps changed nothing: {self._describe_weights()}{self.save()}",
            fix="; ".join([fix, *self.suggest()]),
        )

    def _describe_weights(self) -> str:
        """Describe what a stop leaves; a good step may have ruined it, if it was finite and far too large."""
        own = get_locals(p.detach() for p in self.model.parameters() if p.requires_grad)
        largest = max((float(p.abs().max()) for p in own if p.numel()), default=0.0)
        text = f", finite and far too large (weights up to {largest:.1g}): go back to an earlier checkpoint"
        return "the weights are those of the last good step" + (text if largest > RUINED else "")

    def _roll_back(self, verdict: Verdict) -> bool:
        """Restore a snapshot from well before the first fault and cut learning rates; return False if there is none.

        Data and random generators continue, so that training does not meet the same batches again. Learning rates that
        no schedule sets are cut as they are now: the user's loop sets them.
        """
        state = self.snapshots.find_before(verdict.first_fault_committed) if self.snapshots is not None else None
        if self.snapshots is None or state is None:
            return False
        steps = self.step.steps.values() if isinstance(self.step, PhasedStep) else [self.step]
        unscheduled = [one.optimizer for step in steps for one in step.committers if one.rates is None]
        rates = [[group["lr"] for group in optimizer.param_groups] for optimizer in unscheduled]
        self.snapshots.go_back(state, self.model, self.step)
        self.guard.note_rollback()
        self.cut_rates()
        for optimizer, before in zip(unscheduled, rates, strict=True):
            for group, lr in zip(optimizer.param_groups, before, strict=True):
                group["lr"] = lr * self.guard.options.lr_cut
        committed, factor = state["step"]["committed"], self.guard.rate_factor
        text = f"rolled back to committed step {committed} ({verdict.reason}); learning rate now x{factor:g}"
        self.report(text, verdict, committed, self.guard)
        return True
