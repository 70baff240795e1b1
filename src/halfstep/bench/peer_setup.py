"""What every peer gets: the same model, the same batches, AdamW, and a process that looks as if it were its own.

`documented` is what a project's own pages show for the precision, with the compiler on. `tuned` adds what somebody who
reads the performance guides does by hand: channels_last where it is known to help, fused AdamW, the loss inside the
compiled region, TF32 for what stays fp32, cudnn.benchmark. `graphs` is `tuned` with the compiler's own CUDA graphs
(mode `reduce-overhead`).

`apart` restores what every row may change: backend flags, memory and compiled code. Frameworks change more: they print
and warn, install signal handlers, set environment variables and draw random numbers; `isolated` undoes that.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, cast

import torch
from torch import Tensor, nn
from torch._dynamo import config as dynamo_config
from torch.utils.data import DataLoader, Dataset

from halfstep.backend_flags import fp32_mode
from halfstep.bench.apart import apart
from halfstep.bench.problem import AfterStep, Batch, Problem
from halfstep.errors import HalfstepError
from halfstep.kernels.fast_forms import forced

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

        In channels_last it was timed without trials alone, and gained nothing (benchmarks/NOTES.md).
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


SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextlib.contextmanager
def isolated(device: torch.device) -> Iterator[None]:
    """Quiet and with nothing compiled; flags, seeds, environment and signal handlers are put back on exit."""
    on_cuda = device.type == "cuda"
    with (
        quiet(),
        apart(device),
        _environment_put_back(),
        _signals_put_back(),
        torch.random.fork_rng(devices=[device] if on_cuda else []),
        torch.cuda.device(device) if on_cuda else contextlib.nullcontext(),
        # A peer that silently stopped being compiled would be timed as something it is not.
        dynamo_config.patch(fail_on_recompile_limit_hit=True),
        # Our models would compute in our own fast forms: a peer's user writes torch's layers.
        forced(False),
    ):
        yield


@contextlib.contextmanager
def float32_as_asked(precision: str, *, by_hand: bool) -> Iterator[None]:
    """`fp32` is strict and `tf32` is not; beside bf16 or fp16, TF32 is on for those who know of it, else as found."""
    if precision in ("fp32", "tf32") or by_hand:
        with fp32_mode("ieee" if precision == "fp32" else "tf32"):
            yield
    else:
        yield


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """No warnings and no log lines below errors."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)


@contextlib.contextmanager
def _environment_put_back() -> Iterator[None]:
    before = dict(os.environ)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


@contextlib.contextmanager
def _signals_put_back() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield  # Python lets only the main thread set handlers, so nobody else could have
        return
    before = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
