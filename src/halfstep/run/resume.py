"""What may change between the two halves of a run, and what would make it another run."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from halfstep.config.schema import RunConfig
from halfstep.errors import CheckpointError

FREE = (
    "train.epochs", "train.max_steps", "train.early_stopping_patience", "train.checkpoint_every",
    "train.checkpoints_total_limit", "train.report_every", "train.validate_every", "train.auto_batch",
    "data.num_workers", "data.dir", "log.",
)  # fmt: skip
"""Keys that change how long a run goes on or what it tells, not what a step computes."""


def flattened(section: BaseModel, prefix: str = "") -> dict[str, Any]:
    """Every value of a config by its full path."""
    found: dict[str, Any] = {}
    for name in type(section).model_fields:
        value = getattr(section, name)
        found |= flattened(value, f"{prefix}{name}.") if isinstance(value, BaseModel) else {f"{prefix}{name}": value}
    return found


def refuse_changes(stored: RunConfig, asked: RunConfig, *, allow: bool) -> list[str]:
    """The differences, as notes; those that would change what a step computes are refused unless allowed."""
    before, now = flattened(stored), flattened(asked)
    changed = [key for key in now if now[key] != before.get(key)]
    notes = [f"{key}: {before.get(key)} -> {now[key]}" for key in changed]
    binding = [note for key, note in zip(changed, notes, strict=True) if not key.startswith(FREE)]
    if binding and not allow:
        raise CheckpointError(
            "this run was started with other settings: " + "; ".join(binding),
            why="a resumed run continues exactly; with other settings it would be another run",
            fix="leave them out, or accept a run of two halves with --allow-changes",
        )
    return notes
