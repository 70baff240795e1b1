"""Several processes that train one model: the one place that knows of them, on torch.distributed and DDP.

    before backward   SUM of the first weights: the unit that every rank weighs its micro-batches in
    backward          DDP averages the gradients of the window's last micro-batch; the others stay local (no_sync)
    after backward    one SUM of weight, loss x weight, who asked to stop and each rank's flags

Everything a verdict is made of comes out of that sum or of the averaged gradients, on the device, so every rank
commits, skips, rolls back and stops alike and the host waits for nothing. Gradients are those of the global batch: a
micro-batch counts by its weight, whatever the others have, and a rank of weight 0 runs backward as well.

What one rank alone cannot do, such as capture its step or compile it, it does in the next best mode in the same step,
whose collectives are the same in every mode; its flags tell the others, who follow after the same later step.

Refused here: FSDP and its kind (refusals.py). They would change this file.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from halfstep import __version__
from halfstep.distributed.world import World, mark_agreed
from halfstep.errors import ConfigError, ModelError
from halfstep.step.facts import FELL, PER_RANK, Reading, Slower

UNCAPTURED = 11  # windows that DDP must have run before a CUDA graph may hold it, by torch's notes on CUDA graphs
NEVER = 2**30  # iterations of DDP between two of which it takes the time, after its first ten
BAD, RUINED, EMPTY = 1, 2, 4  # a rank's flags: loss not finite, a buffer not finite, nothing to train on


@dataclass(frozen=True, slots=True)
class Agreed:
    weight: Tensor
    loss: Tensor
    said: Tensor
    """Who asked to stop (how many), then of each rank the flags, the seconds it waited for the others, and its rate."""

    def has_any(self, flag: int) -> Tensor:
        return (self.said[1 : 1 + len(self.said) // PER_RANK].long() & flag).any()


class Ranks:
    """A step's part in the world: its weights, its gradients, its verdict."""

    def __init__(self, world: World, wrapped: Sequence[DistributedDataParallel], device: torch.device) -> None:
        self.world, self.wrapped, self.device = world, list(wrapped), device
        world.talking += self.wrapped
        self.asked = torch.zeros((), dtype=torch.float64, device=device)
        """1 where somebody asked this rank to stop; written by the host between steps."""
        self.uncompiled: Exception | None = None  # why this rank ran a step eager that was to be compiled
        self.talks_in_backward = any(isinstance(m, nn.SyncBatchNorm) for w in self.wrapped for m in w.modules())
        """Whether layers or the loss have sums of their own in there, so that every rank must run the same one."""
        self._fell = torch.zeros_like(self.asked)
        self._waited_s = torch.zeros_like(self.asked)
        self._marks: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        self._own = torch.zeros(world.size, dtype=torch.float64, device=device)
        self._own[world.rank] = 1
        self._num_reduced = 0
        self._entered: set[int] = set()
        """The DDPs whose forward pass has run in the window's last micro-batch, so that they sum its gradients."""
        for module in self.wrapped:
            module.register_forward_pre_hook(self._enter)

    def _enter(self, wrapped: nn.Module, inputs: Any) -> None:
        if wrapped.require_backward_grad_sync:
            self._entered.add(id(wrapped))

    @property
    def size(self) -> int:
        return self.world.size

    @property
    def can_be_captured(self) -> bool:
        """Whether DDP has settled its buckets and measured its first iterations."""
        return self._num_reduced >= UNCAPTURED

    def ask_to_stop(self) -> None:
        """Have the next step tell all ranks that the run is to end."""
        self.asked.fill_(1)

    def announce_mode(self, mode: Slower) -> None:
        """Have the next verdict tell all ranks that this one's steps run in a slower mode from now on."""
        self._fell.fill_(FELL[mode])

    @contextmanager
    def reduce_last(self, *, is_last: bool) -> Iterator[None]:
        """Around forward and backward: gradients travel with the window's last micro-batch only."""
        self._entered.clear()
        with ExitStack() as quiet:
            for wrapped in () if is_last else self.wrapped:
                if self._num_reduced or not wrapped.static_graph:  # of a static one torch must see a first sum
                    quiet.enter_context(wrapped.no_sync())
            yield
        self._num_reduced += is_last

    def agree_on_unit(self, weight: Tensor | float | int) -> Tensor:
        """The mean of all ranks' first weights: equal ones count exactly 1 each, as in plain DDP."""
        mean = self._to_tensor(weight) / self.size
        with self._time_wait():
            dist.all_reduce(mean)
        return torch.where(mean > 0, mean, torch.ones_like(mean)).float()

    @contextmanager
    def _time_wait(self) -> Iterator[None]:
        """How long this rank waits for the others where they first meet in a step: the slowest one waits least. On CUDA
        it is known one step later, and of captured steps it is not."""
        if self.device.type != "cuda":
            start = time.perf_counter()
            yield
            self._waited_s.fill_(time.perf_counter() - start)
            return
        if torch.cuda.is_current_stream_capturing():
            yield
            return
        if self._marks is not None and self._marks[1].query():
            self._waited_s.fill_(self._marks[0].elapsed_time(self._marks[1]) / 1e3)
        self._marks = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self._marks[0].record(torch.cuda.current_stream(self.device))
        yield
        self._marks[1].record(torch.cuda.current_stream(self.device))

    def make_empty_loss(self, loss: Tensor, parameters: Sequence[Tensor]) -> Tensor:
        """A loss of 0 whose backward pass reaches every parameter: the other ranks wait for this one's gradients."""
        if self.talks_in_backward:
            return loss * 0
        trained = [p for p in parameters if p.requires_grad]
        return torch.stack([p.flatten()[:0].sum().float() for p in trained]).sum()

    def agree(self, loss_sum: Tensor, weight: Tensor | float | int, ruined: Tensor, rate: Tensor) -> Agreed:
        """One SUM over all ranks of what their windows came to."""
        share = self._to_tensor(weight)
        loss_sum = torch.where(share == 0, torch.zeros_like(share), loss_sum.double())
        flags = BAD * (loss_sum - loss_sum != 0).double() + RUINED * ruined.double() + EMPTY * (share == 0).double()
        waited_s = self._waited_s
        if waited_s.is_cuda and torch.cuda.is_current_stream_capturing():
            waited_s = torch.zeros_like(waited_s)
        own = [self._own * (flags + self._fell), self._own * waited_s, self._own * rate.reshape(())]
        both = torch.cat([torch.stack([share, loss_sum, self.asked]), *own])
        dist.all_reduce(both)
        loss = torch.where(both[0] == 0, torch.full_like(both[0], float("nan")), both[1] / both[0])
        return Agreed(weight=both[0].float(), loss=loss.float(), said=both[2:])

    def agree_on_any(self, flag: Tensor) -> Tensor:
        found = flag.float()
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return found > 0

    def refuse_empty(self, window: Sequence[Any]) -> None:
        """Before the others are in this step."""
        if not window:
            raise ConfigError(
                f"rank {self.world.rank} has an empty window",
                why="every rank runs forward and backward in every step: the others wait for its gradients",
                fix="give each rank as many batches; one that must not count returns (loss, 0) from loss_fn",
            )

    def refuse_unreduced(self, parameters: Sequence[Tensor], model: nn.Module) -> None:
        """Gradients that DDP did not sum, over which ranks would part in silence: those of a loss that went around it,
        and those in a bucket with a parameter that got none."""
        for wrapped in self.wrapped:
            if id(wrapped) not in self._entered and any(p.grad is not None for p in wrapped.parameters()):
                raise ModelError(
                    f"the loss of rank {self.world.rank} went around DistributedDataParallel",
                    why="gradients are summed over all ranks only where the model is called through it",
                    fix="call model(x), not model.module(x), and leave no_sync() out: the step enters it by itself",
                )
        missing = [p for p in parameters if p.requires_grad and p.grad is None]
        if missing and not all(wrapped.find_unused_parameters for wrapped in self.wrapped):
            known = {id(parameter): name for name, parameter in model.named_parameters()}
            named = ", ".join(known.get(id(p), f"one of shape {tuple(p.shape)}") for p in missing[:4])
            raise ModelError(
                f"{len(missing)} trained parameters took no part in the loss: {named}",
                why="DDP waits for the gradients of all of them, and leaves those beside them unreduced",
                fix="train.find_unused=true (in your own loop DDP(..., find_unused_parameters=True)), or freeze them",
            )

    def _to_tensor(self, weight: Tensor | float | int) -> Tensor:
        if isinstance(weight, Tensor):
            return weight.detach().to(self.device, torch.float64).reshape(())
        return torch.full((), float(weight), dtype=torch.float64, device=self.device)


Reduce = Literal["fp32", "bf16"]


class Regions(nn.Module):
    """Forward and loss of a model as one module, so that DDP can stand around them whatever they call of the model."""

    def __init__(self, model: nn.Module, regions: Mapping[str, Callable[..., Any]]) -> None:
        super().__init__()
        self.model, self.regions = model, dict(regions)

    def forward(self, name: str, batch: Any) -> Any:
        return self.regions[name](batch)


def wrap_regions(
    model: nn.Module,
    regions: Mapping[str, Callable[..., Any]],
    device: torch.device,
    *,
    reduce: Reduce = "fp32",
    find_unused: bool = False,
) -> DistributedDataParallel:
    """DDP around these regions of the model; the first rank's buffers are everybody's before each forward pass."""
    inside = Regions(model, regions)
    side = torch.cuda.Stream(device) if device.type == "cuda" else None  # so that a CUDA graph can hold its backward
    if side is not None:
        side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        # Gradients are views of the buckets: nothing is copied back after the sum.
        wrapped = DistributedDataParallel(
            inside,
            device_ids=[device.index] if side is not None else None,
            find_unused_parameters=find_unused,
            gradient_as_bucket_view=True,
        )
    if side is not None:
        torch.cuda.current_stream(device).wait_stream(side)
    wrapped._set_ddp_runtime_logging_sample_rate(NEVER)  # it waits for the device, which no capture survives
    formats = {p.dtype for p in model.parameters() if p.requires_grad}
    if formats != {SUMMED_IN[reduce]}:
        # A lambda: of annotations torch takes none but its own class, and ours are texts.
        wrapped.register_comm_hook(SUMMED_IN[reduce], lambda dtype, bucket: average_in(dtype, bucket))
    return wrapped


SUMMED_IN: dict[Reduce, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}


def average_in(dtype: torch.dtype, bucket: Any) -> torch.futures.Future[Tensor]:
    """DDP's mean over the ranks, summed in a number format of its own. Torch's own hook for bf16 is for NCCL alone."""
    own: Tensor = bucket.buffer()
    sums = own.to(dtype, copy=True).div_(dist.get_world_size())
    future = dist.all_reduce(sums, async_op=True).get_future()

    def back(done: torch.futures.Future[Any]) -> Tensor:
        return own.copy_(done.value()[0])

    averaged: torch.futures.Future[Tensor] = future.then(back)
    return averaged


# --- models that the user wrapped in DDP ---


RESTART_RANKS = "start all ranks again from your last checkpoint; torchrun --max-restarts=3 starts them by itself"
MOST_NAMES = 4  # names that a message has room for


def find_ranks(model: nn.Module, trained: Sequence[Tensor], device: torch.device) -> Ranks | None:
    """The step's part in the world; None where there is neither a world nor a DDP."""
    size = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    wrapped = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
    if size > 1:
        _refuse_unwrapped(model, trained, wrapped, size)
    if not wrapped:
        return None
    patience_s = c10d._get_default_group()._get_backend(device).options._timeout.total_seconds()
    return Ranks(World(limit_s=patience_s, limit_name="", go_on=RESTART_RANKS), wrapped, device)


def _refuse_unwrapped(
    model: nn.Module, trained: Sequence[Tensor], wrapped: Sequence[DistributedDataParallel], size: int
) -> None:
    """Of what no DDP knows each rank would train values of its own."""
    if not wrapped:
        raise ConfigError(
            f"torch.distributed runs {size} processes, and the model is not wrapped in DDP",
            why="each rank would train weights of its own",
            fix="two lines before the optimizer: from torch.nn.parallel import DistributedDataParallel; "
            "model = DistributedDataParallel(model)",
        )
    if any(ddp.process_group.size() != size for ddp in wrapped):
        raise ConfigError(
            f"DistributedDataParallel joins {wrapped[0].process_group.size()} of {size} processes",
            why="a step has one verdict for all of them",
            fix="leave process_group= out, so that all processes train the model",
        )
    summed = {id(p) for ddp in wrapped for name, p in ddp.module.named_parameters()
              if name not in ddp.parameters_to_ignore}  # fmt: skip
    outside = [p for p in trained if p.requires_grad and id(p) not in summed]
    if outside:
        names = {id(p): name for name, p in model.named_parameters()}
        shown = ", ".join(names.get(id(p), f"one of shape {tuple(p.shape)}") for p in outside[:MOST_NAMES])
        raise ConfigError(
            f"{len(outside)} trained parameters are in no DistributedDataParallel: {shown}",
            why="their gradients are not summed: each rank would train values of its own",
            fix="make them part of the module that DDP wraps, or wrap the module that holds them as well",
        )


def refuse_other_steps(world: World, optimizers: Sequence[Optimizer], settings: Mapping[str, Any]) -> None:
    """Steps that were made otherwise on another rank."""
    own = {"halfstep": __version__, "torch": torch.__version__, **settings}
    own |= {"optimizers": ", ".join(type(optimizer).__name__ for optimizer in optimizers)}
    refuse_other_settings(
        world, own, why="the weights of the ranks would part", fix="make hs.Step alike on every rank"
    )  # fmt: skip


def refuse_other_settings(world: World, own: Mapping[str, Any], *, why: str, fix: str) -> None:
    """What all ranks must have alike, compared; every one of them is told who differs."""
    first, *others = world.gather({name: str(value) for name, value in own.items()})
    for rank, other in enumerate(others, 1):
        keys = [key for key in first | other if first.get(key) != other.get(key)]
        if keys:
            shown = "; ".join(f"{key}: {first.get(key)} and {other.get(key)}" for key in keys[:MOST_NAMES])
            raise mark_agreed(ConfigError(f"rank 0 and rank {rank} differ in {shown}", why=why, fix=fix))


def refuse_other_rates(facts: object, reading: Reading) -> None:
    """A learning rate that one rank was given alone, as by a scheduler that saw its own score."""
    for rank, rate in enumerate(reading.rates):
        if not math.isclose(rate, reading.rates[0], rel_tol=1e-6):
            raise mark_agreed(
                ConfigError(
                    f"learning rates differ at step {reading.attempted}: {reading.rates[0]:g} on rank 0, "
                    f"{rate:g} on rank {rank}",
                    why="the weights of the ranks part from there",
                    fix="set it alike on every rank; a score that a scheduler sees must be that of all ranks: "
                    "dist.all_reduce(score) before step.validated(score)",
                )
            )
