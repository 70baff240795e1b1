"""What a run will write, held against the room there is, before it trains for hours towards a full disk."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor, nn

from halfstep.config.schema import RunConfig
from halfstep.disk import get_free_bytes
from halfstep.errors import CheckpointError, format_bytes
from halfstep.run.assemble import Assembly
from halfstep.run.folder import RunFolder
from halfstep.step.guard import LAG
from halfstep.tune.memory_low import MemorySetting, optimizer_for

REPORT_BYTES = 8_000_000  # metrics, pictures, settings: a few MB
SIDE = 256
"""Of the square weight on which an optimizer shows how much it keeps: large enough for what comes once a weight."""


def check_disk(parts: Assembly, folder: RunFolder) -> list[str]:
    """Refuse where not even the next checkpoints fit; what else to know as notes."""
    place = next(path for path in (folder.path, *folder.path.absolute().parents) if path.is_dir())
    stored = folder.checkpoints().all()
    size = folder_bytes(stored[-1]) if stored else checkpoint_bytes(parts)
    num_further = max(1, _num_kept(parts) - len(stored))
    # A checkpoint is written beside the one before it.
    at_least = min(2 - bool(stored), num_further) * size + REPORT_BYTES
    in_all, free = num_further * size + REPORT_BYTES, get_free_bytes(folder.path)
    if free < at_least:
        raise CheckpointError(
            f"{format_bytes(free)} are free in {place}, and this run needs {format_bytes(at_least)}",
            why=f"a checkpoint takes about {format_bytes(size)}, and is written beside the one before it",
            fix="make room" if stored else "make room, or choose another place with --out",
        )
    if free >= in_all:
        return []
    fitting = max(1, (free - REPORT_BYTES) // size + len(stored) - 2)
    return [
        f"the disk may fill up: {format_bytes(free)} are free in {place}, and this run will write about "
        f"{format_bytes(in_all)} ({num_further} checkpoints of {format_bytes(size)}): make room, or "
        f"train.checkpoints_total_limit={fitting}"
    ]


def checkpoint_bytes(parts: Assembly) -> int:
    """Weights, their average, optimizer, and the snapshots of `guard.on_fault=rollback`."""
    weights = _bytes(parts.model.state_dict().values())
    average = 4 * sum(tensor.numel() for tensor in parts.model.state_dict().values()) if parts.step.ema else 0
    trained = sum(p.numel() for p in parts.model.parameters() if p.requires_grad)
    one = weights + average + round(trained * state_bytes_each(parts.config, MemorySetting(**parts.plan.memory)))
    guard = parts.config.guard
    num_snapshots = math.ceil((guard.margin + LAG) / guard.snapshot_every) + 1 if parts.snapshots is not None else 0
    return one * (1 + num_snapshots)


def state_bytes_each(config: RunConfig, setting: MemorySetting) -> float:
    """What the optimizer keeps for one weight, by a step of it on a small one."""
    weight = nn.Parameter(torch.zeros(SIDE, SIDE))
    weight.grad = torch.zeros_like(weight)
    groups = [{"params": [weight], "weight_decay": 0.0}]
    optimizer = optimizer_for(setting, config.optimizer.name, groups, lr=1e-3, options=config.optimizer.options())
    optimizer.step()
    kept = (value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor))
    return _bytes(kept) / weight.numel()


def folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def _num_kept(parts: Assembly) -> int:
    """Checkpoints that lie there at once: the newest, the best, and one that is being written."""
    train = parts.config.train
    steps_each = train.checkpoint_every or max(1, math.ceil(len(parts.train_loader) / train.accumulate))
    steps_each = min(steps_each, train.validate_every_steps or steps_each)
    written = math.ceil(parts.total_steps / steps_each)
    return min(written, train.checkpoints_total_limit + 2) if train.checkpoints_total_limit else written


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
