"""What the model makes, for people to look at while it trains: a run with samples is the same run to the bit."""

from __future__ import annotations

from pathlib import Path

from halfstep.data.seeds import Key
from halfstep.report.samples import write_samples
from halfstep.run.assemble import Assembly
from halfstep.run.validate import averaged, evaluating
from halfstep.step.randomness import generator_states, restore_generators


def sample(parts: Assembly, folder: Path) -> list[Path]:
    """Call the workload's `sample` with the weights that validation uses; no generator is any further afterwards."""
    assert parts.workload.sample is not None
    generators = generator_states()
    parts.values.refresh()
    try:
        with averaged(parts.step), evaluating(parts.model), parts.plan.forward():
            found = parts.workload.sample(parts.model, Key.of_sampling(parts.config.train.seed))
    finally:
        restore_generators(generators)
    return write_samples(folder, found)
