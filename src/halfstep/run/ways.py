"""The ways a step can run: eager, compiled, or as one CUDA graph of compiled kernels; and which one was asked for."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from halfstep.config.schema import RunConfig
from halfstep.errors import ConfigError
from halfstep.precision.plan import Plan

Way: TypeAlias = Literal["eager", "compile", "graph"]
Batch: TypeAlias = dict[str, Tensor]
Region: TypeAlias = Callable[[Batch], tuple[Tensor, Tensor | float, Any]]
"""Forward and loss of one batch: (loss, weight, outputs). This is what gets compiled."""

NEEDS_CUDA = "train.fast=graph needs a CUDA device, this run is on {}: the step is compiled, not captured"


def asked_way(config: RunConfig, plan: Plan) -> Way | None:
    """What the settings or the stored plan say; None where it is left to measurement (`auto` on a CUDA device)."""
    wish = config.train.fast
    if plan.simulated and wish in ("compile", "graph"):
        raise ConfigError(
            "a simulated precision cannot be compiled", why="simulation is eager only", fix="train.fast=off"
        )
    if plan.way:
        return plan.way
    if wish == "auto":
        # Repeatable to the bit means the same kernels each time, and inductor times its kernels anew.
        is_measured = plan.on_cuda and not config.train.deterministic and not plan.simulated
        return None if is_measured else "eager"
    return "eager" if wish == "off" else "compile" if wish == "compile" or not plan.on_cuda else "graph"


def compiled(eager: Region, *, tuned: bool) -> Region:
    """The region as torch.compile makes it, lazily: the compiler is loaded when the first batch comes.

    Shapes are static: batches of another size run the eager region, so that an epoch's last batch compiles nothing.
    `tuned` lets inductor search each kernel's block sizes: 6 % of ResNet-50's step on an H200, a minute more to start.
    """

    @functools.cache
    def region() -> Region:
        options: dict[str, Any] = {"coordinate_descent_tuning": True} if tuned else {}
        return torch.compile(eager, dynamic=False, options=options)

    return lambda batch: region()(batch)
