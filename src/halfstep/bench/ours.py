"""halfstep as one who is timed: the run room's own assembly, step, guard and prefetch, on random data."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from halfstep.bench.problem import random_workload
from halfstep.bench.runner import AfterStep, Problem
from halfstep.bench.settings import Way, in_precision, run_by
from halfstep.data.prefetch import prefetch
from halfstep.errors import TrainingStopped
from halfstep.hardware.facts import Hardware
from halfstep.run.assemble import Assembly, assemble, plan_for
from halfstep.run.layout import in_layout_of
from halfstep.run.randomness import algorithms, seed_everything
from halfstep.train.facts import Facts
from halfstep.train.guard import Action


class Ours:
    """halfstep in one of its ways."""

    name = "halfstep"

    def __init__(self, problem: Problem, precision: str, way: Way, hardware: Hardware, *, simulate: bool) -> None:
        self.problem, self.precision, self.variant, self.hardware = problem, precision, str(way), hardware
        self.simulated = simulate
        self.config = run_by(in_precision(problem.config, precision, simulate=simulate), way)
        self.remarks: list[str] = []

    def train(self, steps: int, after_step: AfterStep) -> float:
        problem = self.problem
        seed_everything(self.config.train.seed)
        workload = random_workload(self.config, problem.make_model(), problem.host_batch)
        plan = plan_for(self.config, workload, self.hardware)
        with algorithms(deterministic=self.config.train.deterministic):
            parts = assemble(self.config, workload, plan)
            return _trained(parts, problem, steps, after_step)


def _trained(parts: Assembly, problem: Problem, steps: int, after_step: AfterStep) -> float:
    facts: Facts | None = None
    metrics = parts.workload.metrics()

    def loss(batch: dict[str, Tensor]) -> tuple[Tensor, Tensor | float]:
        value, weight, outputs = parts.region(batch)
        with torch.no_grad():
            metrics.update(outputs, batch)
        return value, weight

    for number, batch in enumerate(prefetch(itertools.repeat(problem.host_batch, steps), problem.device)):
        prepared = parts.workload.prepare(batch, key=(0, number), training=True)
        facts = parts.step(loss, [in_layout_of(parts.model, prepared)])
        verdict = parts.guard.watch(facts)
        if verdict.action is not Action.CONTINUE:
            raise TrainingStopped(f"training stopped: {verdict.reason}", fix=verdict.fix)
        after_step()
    assert facts is not None, "at least one step is asked for"
    return facts.read().loss
