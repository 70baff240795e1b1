"""halfstep as one who is timed: the run room's own assembly, engine, guard and prefetch, on random data."""

from __future__ import annotations

import itertools

from halfstep.bench.problem import random_workload
from halfstep.bench.runner import AfterStep, Problem
from halfstep.bench.settings import Way, in_precision, run_by
from halfstep.data.prefetch import prefetch
from halfstep.errors import HardwareError, TrainingStopped
from halfstep.hardware.facts import Hardware
from halfstep.run.assemble import assemble, plan_for
from halfstep.run.engine import Engine
from halfstep.run.randomness import algorithms, seed_everything
from halfstep.train.facts import Facts
from halfstep.train.guard import Action, Guard


class Ours:
    """halfstep in one of its ways."""

    name = "halfstep"

    def __init__(self, problem: Problem, precision: str, way: Way, hardware: Hardware, *, simulate: bool) -> None:
        self.problem, self.precision, self.variant, self.hardware = problem, precision, str(way), hardware
        self.simulated = simulate
        self.config = run_by(in_precision(problem.config, precision, simulate=simulate), way)
        self.remarks: list[str] = []
        """What the run said of itself while it trained."""

    def train(self, steps: int, after_step: AfterStep) -> float:
        self.remarks.clear()
        seed_everything(self.config.train.seed)
        workload = random_workload(self.config, self.problem.make_model(), self.problem.host_batch)
        plan = plan_for(self.config, workload, self.hardware)
        with algorithms(deterministic=self.config.train.deterministic):
            parts = assemble(self.config, workload, plan)
            metrics = workload.metrics()
            engine = Engine(parts, parts.way or "eager", lambda text, level: self.remarks.append(text), metrics.update)
            loss = self._trained(engine, parts.guard, steps, after_step)
        self._check(engine.way)
        return loss

    def _trained(self, engine: Engine, guard: Guard, steps: int, after_step: AfterStep) -> float:
        facts: Facts | None = None
        for batch in prefetch(itertools.repeat(self.problem.host_batch, steps), self.problem.device):
            facts = engine([batch])
            verdict = guard.watch(facts)
            if verdict.action is not Action.CONTINUE:
                raise TrainingStopped(f"training stopped: {verdict.reason}", fix=verdict.fix)
            after_step()
        assert facts is not None, "at least one step is asked for"
        return facts.read().loss

    def _check(self, ran: str) -> None:
        """A row must not show another way's time."""
        if self.variant == "auto":
            self.remarks.append(f"ran as {ran}")
        elif ran != self.variant:
            raise HardwareError(f"could not run as {self.variant}: {'; '.join(self.remarks) or f'ran as {ran}'}")
