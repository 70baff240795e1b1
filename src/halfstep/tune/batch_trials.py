"""`train.auto_batch` of several processes: what fits is tried before the run, since nobody can leave a step alone."""

from __future__ import annotations

from halfstep.config.schema import RunConfig
from halfstep.errors import MemoryLimitError
from halfstep.precision.plan import Plan
from halfstep.tune.memory_low import DoesNotFit
from halfstep.tune.trials import Rehearse, cost_in
from halfstep.workloads.workload import Workload


def fitting_pieces(config: RunConfig, workload: Workload, plan: Plan, rehearse: Rehearse) -> int:
    """How many micro-batches a batch must be cut into; 1 where it fits as it is."""
    size, pieces = config.train.batch_size, 1
    while True:
        part = config.train.model_copy(update={"batch_size": -(-size // pieces)})
        try:
            cost_in(plan.mode or "eager", config.model_copy(update={"train": part}), workload, plan, rehearse)
        except DoesNotFit as error:
            problem = str(error)
        else:
            return pieces
        if pieces >= size:
            raise MemoryLimitError(
                f"a step with one sample does not fit: {problem}",
                why="train.auto_batch has tried micro-batches down to that",
                fix="train.memory=low, --precision bf16, a smaller model, or a smaller data.image_size",
            )
        pieces *= 2
