"""The levers of `train.memory: low` on a real model: which of them a run has, and how one is pulled."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import nn
from torch.optim import Optimizer

from halfstep.models.recompute import Recomputing
from halfstep.step.adamw8bit import AdamW8bit
from halfstep.step.adamw_bf16 import AdamWBf16
from halfstep.step.half_weights import Rounding, is_kept_in_half
from halfstep.step.optimizers import Options, ParamGroups, build_optimizer
from halfstep.tune.memory_low import BUDGETS, MemorySetting


class Levers(NamedTuple):
    """Positions to try, lever by lever, and why others are missing."""

    positions: list[Sequence[MemorySetting]]
    notes: list[str]


def levers_of(model: nn.Module, optimizer_name: str, *, is_compiled: bool) -> Levers:
    """The most promising lever first: trials may run out of time."""
    positions: list[Sequence[MemorySetting]] = []
    notes: list[str] = []
    if any(isinstance(module, Recomputing) for module in model.modules()):
        positions.append((MemorySetting(recompute="pointwise"), MemorySetting(recompute="blocks")))
    else:
        notes.append(f"recomputing: {type(model).__name__} has no blocks of halfstep.models.recompute")
    if optimizer_name == "adamw":
        positions.append((MemorySetting(optimizer_bits=8),))
    else:
        notes.append(f"8-bit optimizer states: they exist for adamw, not for {optimizer_name}")
    if is_compiled:
        positions.append([MemorySetting(activation_budget=share) for share in BUDGETS])
    else:
        notes.append("activation budget: it needs train.fast=compile or graph")
    return Levers(positions, notes)


def by_predicted_peak(
    levers: Sequence[Sequence[MemorySetting]], peak: Callable[[MemorySetting], int | None]
) -> list[Sequence[MemorySetting]]:
    """The lever whose gentlest position saves most comes first: time for trials may run out. Levers of which nothing is
    predicted keep their place behind the others."""
    predicted = [peak(lever[0]) for lever in levers]
    order = sorted(range(len(levers)), key=lambda k: (predicted[k] is None, predicted[k] or 0))
    return [levers[k] for k in order]


@contextmanager
def activation_budget(share: float) -> Iterator[None]:
    """Let what is compiled inside keep at most this share of its activations; 1 is torch's own choice.

    It is read when a region is compiled, also a later time for another shape: hold this for the whole run. A region
    compiled under another share must be compiled again; the share is part of inductor's cache key.
    """
    import torch._functorch.config as functorch_config

    patch: Any = functorch_config.patch
    with patch(activation_memory_budget=share):
        yield


def optimizer_for(
    setting: MemorySetting,
    name: str,
    groups: ParamGroups,
    *,
    lr: float,
    options: Options | None = None,
    rounding: Rounding = "split",
    seed: int = 0,
) -> Optimizer:
    """The run's optimizer, its moments stored in the setting's bits; `rounding` is that of weights in bf16."""
    if setting.optimizer_bits == 8:
        return AdamW8bit(groups, lr=lr, rounding=rounding, seed=seed, **dict(options or {}))
    if name == "adamw" and any(is_kept_in_half(p) for group in groups for p in group["params"]):
        return AdamWBf16(groups, lr=lr, rounding=rounding, seed=seed, **dict(options or {}))
    return build_optimizer(name, groups, lr=lr, options=options)
