"""A stored run's peak memory by component, predicted from its settings and plan: nothing runs."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from halfstep.precision.plan import Plan
from halfstep.run.checkpoint import STATE
from halfstep.run.folder import RunFolder
from halfstep.run.memory_plan import Cell, MemoryPlanner
from halfstep.run.planned_step import planned_step
from halfstep.tune.memory_low import MemorySetting
from halfstep.workloads import load


def predicted_memory(path: Path) -> dict[str, int]:
    """Bytes of one micro-batch's step as the run took it."""
    folder = RunFolder.open(str(path))
    config, plan = load(str(folder.config)).config, Plan.from_json(folder.plan.read_text())
    levers: dict[str, Any] = plan.memory or ({"recompute": "blocks"} if config.train.activation_checkpointing else {})
    cell = Cell(
        precision=plan.granted,
        mode=plan.mode or "eager",
        setting=MemorySetting(**levers),
        batch_size=math.ceil(config.train.batch_size / plan.pieces),
        accumulate=config.train.accumulate * plan.pieces,
    )
    return dict(MemoryPlanner(planned_step(config, _store(folder))).predict(cell).components)


def _store(folder: RunFolder) -> dict[str, Any] | None:
    """What the run knew of its data, which may be gone; None where it has no checkpoint."""
    newest = folder.checkpoints().all()[-1:]
    return dict(json.loads((newest[0] / STATE).read_text())["state"]["store"]) if newest else None
