"""What every peer is given: the same model, the same batches, AdamW, and how far its user went for speed.

`documented` is what a project's own pages show for the precision, with the compiler on. `tuned` adds what somebody who
reads the performance guides does by hand: channels_last where it is known to help, fused AdamW, the loss inside the
compiled region, TF32 for what stays fp32, cudnn.benchmark. `graphs` is `tuned` with the compiler's own CUDA graphs
(mode `reduce-overhead`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, cast

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from halfstep.bench.runner import AfterStep, Batch, Problem
from halfstep.errors import HalfstepError

Variant = Literal["documented", "tuned", "graphs"]
LossOf = Callable[[Batch], Tensor]


class PeerMissing(HalfstepError):
    """A peer to compare against is not installed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerSetup:
    """A problem in the hands of a peer's user."""

    problem: Problem
    precision: str
    variant: Variant
    compiler: str = "inductor"
    """The backend of torch.compile; tests take a light one."""

    @property
    def by_hand(self) -> bool:
        """Whether the user did more than the documentation shows."""
        return self.variant != "documented"

    @property
    def channels_last(self) -> bool:
        """Not in strict fp32 on CUDA: the fastest known there is contiguous with cuDNN's trials, as tuned ones run.

        In channels_last it was timed without trials alone, and gained nothing (docs/log.md).
        """
        return self.by_hand and (self.precision, self.problem.device.type) != ("fp32", "cuda")

    @property
    def compile_mode(self) -> str | None:
        return "reduce-overhead" if self.variant == "graphs" else None

    def model(self) -> nn.Module:
        """Seeded and in training mode, still on the host: Lightning and Accelerate move it themselves."""
        model = self.problem.make_model().train()
        # torch knows the keyword, its stubs do not.
        return cast(nn.Module, model.to(memory_format=torch.channels_last)) if self.channels_last else model  # type: ignore[call-overload]

    def optimizer(self, model: nn.Module, *, may_fuse: bool = True) -> torch.optim.AdamW:
        """Over all parameters alike, as every guide writes it."""
        fused = True if self.by_hand and may_fuse else None
        problem, options = self.problem, self.problem.config.optimizer.options()
        decay = problem.weight_decay
        return torch.optim.AdamW(model.parameters(), lr=problem.lr, weight_decay=decay, fused=fused, **options)

    def loader(self, steps: int) -> DataLoader[Batch]:
        """The same batch again and again, for no peer shall wait for data."""
        return DataLoader(_Repeated(self.problem.host_batch, steps), batch_size=None)

    def prepared(self, batch: Batch) -> Batch:
        """What the model sees, images in the model's layout."""
        batch = self.problem.prepare(batch)
        return {name: _channels_last(part) for name, part in batch.items()} if self.channels_last else batch

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Of a batch as it arrived on the device."""
        return self.problem.loss(model, self.prepared(batch))

    def compiled_loss(self, model: nn.Module) -> LossOf:
        """Preparation, forward and loss as one compiled region."""

        def loss(batch: Batch) -> Tensor:
            return self.loss(model, batch)

        return torch.compile(loss, backend=self.compiler, mode=self.compile_mode)


Loop = Callable[[PeerSetup, int, AfterStep], float]
"""Trains so many steps and returns the last loss."""


class _Repeated(Dataset[Batch]):
    def __init__(self, batch: Batch, times: int) -> None:
        self._batch, self._times = batch, times

    def __len__(self) -> int:
        return self._times

    def __getitem__(self, index: int) -> Batch:
        return self._batch


def _channels_last(part: Tensor) -> Tensor:
    return part.contiguous(memory_format=torch.channels_last) if part.ndim == 4 else part
