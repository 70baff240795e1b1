"""halfstep as one who is timed: a run's own assembly, engine, guard and prefetch."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable

from torch import nn

from halfstep.bench.problem import AfterStep, Batch, Problem, random_workload
from halfstep.bench.settings import Mode, in_precision, run_by
from halfstep.data.prefetch import prefetch
from halfstep.errors import HardwareError, TrainingStopped
from halfstep.hardware.facts import Hardware
from halfstep.models.first_values import unfilled
from halfstep.precision.plan import Plan
from halfstep.run.assemble import assemble, plan_for
from halfstep.run.engine import Engine
from halfstep.run.phased_engine import PhasedEngine, engine_for
from halfstep.run.rehearse import rehearsal
from halfstep.step.facts import Facts, PhasedFacts
from halfstep.step.guard import Action
from halfstep.step.randomness import algorithms, seed_everything
from halfstep.tune.choose import tuned
from halfstep.tune.memory_low import MemorySetting
from halfstep.workloads.base.workload import Workload


class Ours:
    """halfstep in one of its modes."""

    name = "halfstep"

    def __init__(self, problem: Problem, precision: str, mode: Mode, hardware: Hardware, *, simulate: bool) -> None:
        self.problem, self.precision, self.variant, self.hardware = problem, precision, str(mode), hardware
        self.simulated = simulate
        self.config = run_by(in_precision(problem.config, precision, simulate=simulate), mode)
        self.remarks: list[str] = []
        """What the run said of itself while it trained."""
        self._plan: Plan | None = None
        """Of the first training: its trials are part of that start, and of no other."""

    def train(self, steps: int, after_step: AfterStep) -> float:
        seed_everything(self.config.train.seed)
        workload = self.workload()
        self._plan = plan = self._plan or self._planned(workload)
        self.remarks = [f"{plan.mode}: {plan.mode_reason}"] if self.variant == "auto" else []
        if plan.memory_reason:
            self.remarks += [f"{MemorySetting(**plan.memory)}: {plan.memory_reason}", *plan.memory_trials]
        with algorithms(deterministic=self.config.train.deterministic):
            parts = assemble(self.config, workload, plan)
            assert parts.mode is not None, "the plan was tuned"
            metrics = workload.metrics()
            engine = engine_for(parts, parts.mode, lambda text, level: self.remarks.append(text), metrics.update)
            batches = prefetch(itertools.repeat(self.problem.host_batch, steps), self.problem.device)
            loss = self._trained(engine, batches, after_step)
        if engine.mode != plan.mode or self.variant not in ("auto", engine.mode):
            # A row must not show another mode's time.
            raise HardwareError(f"could not run as {plan.mode}: {'; '.join(self.remarks) or f'ran as {engine.mode}'}")
        return loss

    def workload(self) -> Workload:
        """As a run would build it, with its seeded weights."""
        model = self.problem.make_model()
        with unfilled():
            return _in_full_swing(random_workload(self.config), model)

    def _planned(self, workload: Workload) -> Plan:
        return tuned(
            self.config, workload, plan_for(self.config, workload, self.hardware), lambda text: None, rehearsal
        )

    def _trained(self, engine: Engine | PhasedEngine, batches: Iterable[Batch], after_step: AfterStep) -> float:
        facts: Facts | PhasedFacts | None = None
        for batch in batches:
            facts = engine([batch])
            verdict = engine.parts.guard.watch(facts)
            if verdict.action is not Action.CONTINUE:
                raise TrainingStopped(f"training stopped: {verdict.reason}", fix=verdict.fix)
            after_step()
        assert facts is not None, "at least one step is asked for"
        return facts.read().loss


def _in_full_swing(workload: Workload, model: nn.Module) -> Workload:
    """With all of its phases begun: most steps of a run are such."""
    phases = tuple(dataclasses.replace(phase, from_step=phase.from_step % phase.every) for phase in workload.phases)
    return dataclasses.replace(workload, model=model, phases=phases)
