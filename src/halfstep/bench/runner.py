"""What is timed: the same problem, run by halfstep in one of its modes or by a peer as its users would.

A peer such as Lightning owns its loop, so a runner is not asked for one step at a time: it trains, and says after
each step that it was made. The time between two such moments is the time of a step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from halfstep.config.schema import RunConfig
from halfstep.workloads.kind import Unit
from halfstep.workloads.workload import Workload

Batch = dict[str, Tensor]
AfterStep = Callable[[], None]
"""Called by a runner once each optimizer step was handed to the device; must not be waited for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """One model, one batch shape, one loss: equal for everybody who is timed."""

    config: RunConfig
    make_model: Callable[[], nn.Module]
    """The same seeded weights each time, on the host, in fp32 and contiguous layout."""
    host_batch: Batch
    """What a loader delivers: samples in (pinned) host memory; copied to the device in every step."""
    prepare: Callable[[Batch], Batch]
    """On the device: to what the model sees, without augmentation."""
    loss: Callable[[nn.Module, Batch], Tensor]
    """Forward and loss of a prepared batch; islands inside."""
    device: torch.device
    lr: float
    weight_decay: float
    clip_norm: float
    samples: int
    """In one step."""
    num_phases: int = 1
    """Optimizer steps of an iteration; a peer's loop makes one."""
    unit: Unit = Unit()
    """What throughput counts."""
    holds_tensors: bool = False
    """Whether the loss reads more than model and batch (frozen parts, scheduled values), which lies on the device."""
    own_data: Workload | None = None
    """The user's own, to be read as in a run; None where one random batch comes over and over."""


class Runner(Protocol):
    """Somebody who can train a problem."""

    name: str
    """`halfstep`, `lightning`, `accelerate`, `plain`."""
    variant: str
    """halfstep: `eager`, `compile`, `graph`; a peer: `documented`, `tuned` or `graphs`."""
    precision: str
    """The canonical word: fp32, tf32, bf16, fp16, fp8."""

    def train(self, steps: int, after_step: AfterStep) -> float:
        """Make so many steps from the seeded start, calling `after_step` after each; the last loss."""
        ...
