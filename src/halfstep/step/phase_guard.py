"""The guard of several phases: one word for the run, faults counted for each phase."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from halfstep.errors import CheckpointError
from halfstep.step.facts import Reading
from halfstep.step.guard import CONTINUE, COUNTERS, Action, Guard, GuardOptions, Verdict
from halfstep.step.phase_facts import parts_of

FROM_MILDEST = (Action.CONTINUE, Action.ROLLBACK, Action.STOP)


class PhasedGuard(Guard):
    """Faults in a row are those of one phase: good steps of another must not excuse it, however seldom it runs.

    `num_skipped` counts dropped steps of all phases, `num_rollbacks` those of the run.
    """

    def __init__(self, options: GuardOptions, phases: Iterable[str], *, scaling: bool, min_scale: float) -> None:
        super().__init__(options, scaling=scaling, min_scale=min_scale)
        self.phases = {name: Guard(options, scaling=scaling, min_scale=min_scale) for name in phases}

    def judge(self, reading: Reading) -> Verdict:
        """The gravest verdict on any phase. Where a rollback goes is counted in iterations, not in a phase's steps."""
        parts = parts_of(reading)
        before = reading.committed - any(not part.is_bad for part in parts.values())
        found = [self._of_phase(name, part, before) for name, part in parts.items()]
        self.num_skipped = sum(guard.num_skipped for guard in self.phases.values())
        return max(found, key=lambda verdict: FROM_MILDEST.index(verdict.action), default=CONTINUE)

    def _of_phase(self, name: str, reading: Reading, committed: int) -> Verdict:
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
        stored = state.get("phases", {})
        if stored.keys() != self.phases.keys():
            raise CheckpointError(
                f"the guard's stored state is of {', '.join(stored) or 'no phases'}, not of {', '.join(self.phases)}",
                fix="resume with the workload the run was started with",
            )
        super().load_state_dict(state)
        for name, guard in self.phases.items():
            guard.load_state_dict({**stored[name], "pending": []})
