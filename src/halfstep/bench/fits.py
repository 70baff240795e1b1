"""Whether a bench can fit a CPU's memory: where it cannot, the system ends the process, and no row is left to tell."""

from __future__ import annotations

from collections.abc import Sequence

from halfstep.bench.problem import kind_with_random_data
from halfstep.config.schema import RunConfig
from halfstep.errors import MemoryLimitError
from halfstep.measure.memory import format_bytes
from halfstep.tune.step_cost import step_cost


def refuse_too_large(config: RunConfig, precisions: Sequence[str], modes: Sequence[str], free_bytes: int) -> None:
    """Raise MemoryLimitError where the most demanding row would need more memory than is free."""
    precision = next((name for name in precisions if name in ("fp32", "tf32")), precisions[0])
    store = kind_with_random_data(config).part("random_store")(config)
    cost, batch_size = step_cost(config, store, precision), config.train.batch_size
    # What is compiled or recomputed may keep fewer activations than are counted.
    keeps_activations = "eager" in modes and config.train.memory != "low"
    needed = cost.bytes_at(batch_size if keeps_activations else 0)
    if needed <= free_bytes:
        return
    fits = (free_bytes - cost.fixed_bytes) // cost.sample_bytes
    raise MemoryLimitError(
        f"{config.workload} at batch {batch_size} needs {format_bytes(needed)} or more, and {format_bytes(free_bytes)} "
        "of this machine's memory are free",
        why=f"{format_bytes(cost.fixed_bytes)} for {cost.num_parameters:,} parameters, gradients and optimizer, "
        f"{format_bytes(cost.sample_bytes)} per sample; the system would end the bench without a word",
        fix=f"{f'--batch-size {fits} or less' if fits > 0 else 'a smaller model'}, or --device cuda where there is one",
    )
