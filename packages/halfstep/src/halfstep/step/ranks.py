"""A step over several ranks, on torch.distributed, DDP and FSDP2. The only file of this package that communicates.

    before backward   SUM of the first weights: the unit in which every rank weighs its micro-batches
    backward          DDP averages the gradients of the window's last micro-batch; the others stay local (no_sync)
    after backward    one SUM of weight, loss x weight, requests to stop, and each rank's flags

The verdict depends only on that sum and on the averaged gradients, on the device, so every rank commits, skips, rolls
back and stops alike and the host waits for nothing. Gradients are those of the global batch: a micro-batch counts by
its weight over all ranks, and a rank of weight 0 runs backward as well.

A rank that cannot capture or compile its step runs it in the next best mode at once: the collectives are the same in
every mode. Its flags tell the others, which all switch after the same later step.

A model that `fully_shard` has sharded (distributed/sharding.py) differs in this:

    backward          FSDP averages the gradients of every micro-batch and leaves this rank's shards of them
    after backward    one SUM more, of the norms of each rank's shards: from it every rank computes the same norm
    commit            optimizers step this rank's shards; whether one wrote non-finite numbers is agreed on

Each forward and backward pass communicates, so ranks need equally many micro-batches, and one of weight 0 runs backward
too. Trained parameters outside of FSDP's modules are averaged here.
"""

from __future__ import annotations

import math
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
from halfstep.distributed.sharding import Sharding, find_sharding, is_dtensor
from halfstep.distributed.world import World, mark_agreed
from halfstep.errors import ConfigError, ModelError
from halfstep.step.clip import compute_total_norm
from halfstep.step.facts import FELL, PER_RANK, Reading, Slower
from halfstep.step.flat import gather, group_by_kind, scatter

UNCAPTURED = 11  # windows that DDP must run before it can be captured (torch's notes on CUDA graphs)
NEVER = 2**30  # DDP iterations between two of its timings, after its first ten
BAD, RUINED, EMPTY = 1, 2, 4  # a rank's flags: loss not finite, a buffer not finite, nothing to train on


@dataclass(frozen=True, slots=True)
class Agreed:
    weight: Tensor
    loss: Tensor
    said: Tensor
    """How many ranks asked to stop; then per rank its flags and its rate."""

    def has_any(self, flag: int) -> Tensor:
        return (self.said[1 : 1 + len(self.said) // PER_RANK].long() & flag).any()


class Ranks:
    """What a step does together with the other ranks: weights, gradients, verdict."""

    def __init__(
        self,
        world: World,
        wrapped: Sequence[DistributedDataParallel],
        device: torch.device,
        sharding: Sharding | None = None,
    ) -> None:
        self.world, self.wrapped, self.device, self.sharding = world, list(wrapped), device, sharding
        self.reduces_last = False
        """Whether a sharded model's gradients are reduced only in the window's last micro-batch: whole ones stay in
        memory until then."""
        world.connected_models += self.wrapped
        self.asked = torch.zeros((), dtype=torch.float64, device=device)
        """1 if this rank was asked to stop; written by the host between steps."""
        self.uncompiled: Exception | None = None  # why this rank ran a step eager instead of compiled
        has_synced_norms = any(isinstance(m, nn.SyncBatchNorm) for w in self.wrapped for m in w.modules())
        self.talks_in_backward = sharding is not None or has_synced_norms
        """Whether layers or the loss communicate in backward, so that every rank must run the same one."""
        self._fell = torch.zeros_like(self.asked)
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
        """True once DDP has settled its buckets and measured its first iterations."""
        return self._num_reduced >= UNCAPTURED

    def ask_to_stop(self) -> None:
        """Tell all ranks with the next step that the run should end."""
        self.asked.fill_(1)

    def announce_mode(self, mode: Slower) -> None:
        """Tell all ranks with the next verdict that this rank's steps run in a slower mode from now on."""
        self._fell.fill_(FELL[mode])

    @contextmanager
    def reduce_last(self, *, is_last: bool) -> Iterator[None]:
        """Reduce gradients only in the window's last micro-batch. Entered around forward and backward."""
        self._entered.clear()
        if self.sharding is not None and self.reduces_last:
            for module in self.sharding.modules:
                module.set_requires_gradient_sync(is_last, recurse=False)
        with ExitStack() as quiet:
            for wrapped in () if is_last else self.wrapped:
                if self._num_reduced or not wrapped.static_graph:  # a static graph needs a first reduced backward
                    quiet.enter_context(wrapped.no_sync())
            yield
        self._num_reduced += is_last

    def agree_on_unit(self, weight: Tensor | float | int) -> Tensor:
        """Return the mean of all ranks' first weights: equal ones count exactly 1 each, as in plain DDP."""
        mean = self._to_tensor(weight) / self.size
        dist.all_reduce(mean)
        return torch.where(mean > 0, mean, torch.ones_like(mean)).float()

    def make_empty_loss(self, loss: Tensor, parameters: Sequence[Tensor]) -> Tensor:
        """Return a loss of 0 whose backward reaches every parameter: the other ranks wait for this one's gradients."""
        if self.talks_in_backward:
            return loss * 0
        trained = [p for p in parameters if p.requires_grad]
        return torch.stack([p.flatten()[:0].sum().float() for p in trained]).sum()

    def agree(self, loss_sum: Tensor, weight: Tensor | float | int, ruined: Tensor, rate: Tensor) -> Agreed:
        """Sum losses, weights and flags of all ranks' windows in one reduction."""
        share = self._to_tensor(weight)
        loss_sum = torch.where(share == 0, torch.zeros_like(share), loss_sum.double())
        flags = BAD * (loss_sum - loss_sum != 0).double() + RUINED * ruined.double() + EMPTY * (share == 0).double()
        own = [self._own * (flags + self._fell), self._own * rate.reshape(())]
        both = torch.cat([torch.stack([share, loss_sum, self.asked]), *own])
        dist.all_reduce(both)
        loss = torch.where(both[0] == 0, torch.full_like(both[0], float("nan")), both[1] / both[0])
        return Agreed(weight=both[0].float(), loss=loss.float(), said=both[2:])

    @torch.no_grad()
    def average_unsharded(self, parameters: Sequence[Tensor]) -> None:
        """Average the gradients of parameters outside of a sharded model's FSDP modules, which no one else reduces."""
        if self.sharding is None:
            return
        own = [p for p in parameters if p.requires_grad and not is_dtensor(p)]
        for parameter in own:
            if parameter.grad is None:  # another rank may have a gradient, and waits for this one's
                parameter.grad = torch.zeros_like(parameter)
        for gradients in group_by_kind(p.grad for p in own if p.grad is not None):
            sums = gather(gradients)
            dist.all_reduce(sums)
            scatter(sums / self.size, gradients)

    def compute_norm(self, tensors: list[Tensor], kind: float = 2.0) -> Tensor:
        """Return the norm over all ranks' shards; each rank gives the tensors that only it counts.

        Every rank computes it from the same numbers in the same order, so that all get the same bits, however the
        backend sums. A NaN of one rank makes it NaN on all."""
        filled = [tensor for tensor in tensors if tensor.numel()]  # the largest of no numbers is an error
        own = compute_total_norm(filled, kind).double() if filled else torch.zeros_like(self.asked)
        norms = torch.where(self._own > 0, own, 0.0)  # not a product: 0 * NaN is NaN
        dist.all_reduce(norms)
        return torch.linalg.vector_norm(norms, kind).float()

    def agree_on_any(self, flag: Tensor) -> Tensor:
        found = flag.float()
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return found > 0

    def refuse_empty(self, window: Sequence[Any]) -> None:
        """Refuse an empty window before the other ranks are in this step."""
        if not window:
            raise ConfigError(
                f"rank {self.world.rank} has an empty window",
                why="every rank runs forward and backward in every step: the others wait for its gradients",
                fix="give every rank the same number of batches; return (loss, 0) for a batch that must not count",
            )

    def refuse_unreduced(self, parameters: Sequence[Tensor], model: nn.Module) -> None:
        """Refuse gradients that DDP did not sum, so that ranks would diverge silently: of a loss computed without
        it, and those in a bucket with a parameter that got no gradient."""
        for wrapped in self.wrapped:
            if id(wrapped) not in self._entered and any(p.grad is not None for p in wrapped.parameters()):
                raise ModelError(
                    f"the loss of rank {self.world.rank} bypassed DistributedDataParallel",
                    why="gradients are summed over all ranks only where the model is called through it",
                    fix="call model(x), not model.module(x), and leave no_sync() out: the step enters it itself",
                )
        missing = [p for p in parameters if p.requires_grad and p.grad is None]
        if missing and not all(wrapped.find_unused_parameters for wrapped in self.wrapped):
            known = {id(parameter): name for name, parameter in model.named_parameters()}
            named = ", ".join(known.get(id(p), f"one of shape {tuple(p.shape)}") for p in missing[:4])
            raise ModelError(
                f"{len(missing)} trained parameters did not contribute to the loss: {named}",
                why="DDP waits for all gradients of a bucket before it reduces any of them",
                fix="train.find_unused=true (with hs.Step: DDP(..., find_unused_parameters=True)), or freeze them",
            )

    def _to_tensor(self, weight: Tensor | float | int) -> Tensor:
        if isinstance(weight, Tensor):
            return weight.detach().to(self.device, torch.float64).reshape(())
        return torch.full((), float(weight), dtype=torch.float64, device=self.device)


Reduce = Literal["fp32", "bf16"]


class Regions(nn.Module):
    """Forward and loss of a model as one module, so that DDP can wrap them whichever methods of the model they call."""

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
    """Wrap these regions of the model in DDP, which copies rank 0's buffers to all ranks before each forward pass."""
    inside = Regions(model, regions)
    # DDP made on a side stream can be captured later.
    side = torch.cuda.Stream(device) if device.type == "cuda" else None
    if side is not None:
        side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        # gradient_as_bucket_view: gradients are views of the buckets, so nothing is copied back after the sum.
        wrapped = DistributedDataParallel(
            inside,
            device_ids=[device.index] if side is not None else None,
            find_unused_parameters=find_unused,
            gradient_as_bucket_view=True,
        )
    if side is not None:
        torch.cuda.current_stream(device).wait_stream(side)
    wrapped._set_ddp_runtime_logging_sample_rate(NEVER)  # the timing waits for the device, which would break a capture
    formats = {p.dtype for p in model.parameters() if p.requires_grad}
    if formats != {SUMMED_IN[reduce]}:
        # A lambda: torch checks a hook's annotations against its own class, and ours are strings.
        wrapped.register_comm_hook(SUMMED_IN[reduce], lambda dtype, bucket: average_in(dtype, bucket))
    return wrapped


SUMMED_IN: dict[Reduce, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}


def average_in(dtype: torch.dtype, bucket: Any) -> torch.futures.Future[Tensor]:
    """Average a bucket over the ranks in another dtype than the gradients'. Torch's bf16 hook works with NCCL only."""
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
    """Return the ranks of a user's model by its DDP or FSDP2; None without. Refuse models that ranks would not
    share."""
    size = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    wrapped = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
    sharding = find_sharding(model)
    if sharding is not None:
        refuse_unfit_sharding(sharding, model, trained)
    elif size > 1:
        _refuse_unwrapped(model, trained, wrapped, size)
    if not wrapped and sharding is None:
        return None
    patience_s = c10d._get_default_group()._get_backend(device).options._timeout.total_seconds()
    world = World(limit_s=patience_s, limit_name="", go_on=RESTART_RANKS)
    if sharding is not None:  # as DDP does: ranks must start from the same values
        world.broadcast_([p.detach() for p in trained if not is_dtensor(p)])
    return Ranks(world, wrapped, device, sharding)


def _refuse_unwrapped(
    model: nn.Module, trained: Sequence[Tensor], wrapped: Sequence[DistributedDataParallel], size: int
) -> None:
    """Refuse parameters outside of DDP: each rank would train different values."""
    if not wrapped:
        raise ConfigError(
            f"torch.distributed runs {size} ranks, but the model is not wrapped in DDP",
            why="each rank would train different weights",
            fix="two lines before the optimizer: from torch.nn.parallel import DistributedDataParallel; "
            "model = DistributedDataParallel(model); a model that does not fit: fully_shard (docs/distributed.md)",
        )
    if any(ddp.process_group.size() != size for ddp in wrapped):
        raise ConfigError(
            f"DistributedDataParallel covers {wrapped[0].process_group.size()} of {size} ranks",
            why="all ranks must accept or drop a step together",
            fix="leave process_group= out, so that all ranks train the model",
        )
    summed = {id(p) for ddp in wrapped for name, p in ddp.module.named_parameters()
              if name not in ddp.parameters_to_ignore}  # fmt: skip
    outside = [p for p in trained if p.requires_grad and id(p) not in summed]
    if outside:
        names = {id(p): name for name, p in model.named_parameters()}
        shown = ", ".join(names.get(id(p), f"one of shape {tuple(p.shape)}") for p in outside[:MOST_NAMES])
        raise ConfigError(
            f"{len(outside)} trained parameters are not wrapped in DistributedDataParallel: {shown}",
            why="their gradients are not summed: each rank would train different values",
            fix="make them part of the module that DDP wraps, or also wrap the module that contains them",
        )


# --- models that the user sharded with fully_shard ---


def refuse_unfit_sharding(sharding: Sharding, model: nn.Module, trained: Sequence[Tensor]) -> None:
    """Refuse models whose ranks could not decide together, or would train different values."""
    mesh, size = sharding.mesh, dist.get_world_size()
    sharded: list[Any] = [p for p in model.parameters() if is_dtensor(p)]
    has_others = any(p.device_mesh != mesh for p in sharded)
    is_data_parallel = mesh.ndim == 1 or mesh.ndim == 2 and all(p.placements[0].is_replicate() for p in sharded)
    if has_others or mesh.size() != size or not is_data_parallel:
        over = f"{'several meshes, one' if has_others else 'a mesh'} of {sharding.describe()}"
        raise ConfigError(
            f"the model is sharded over {over}, but {size} ranks train it",
            why="all ranks must accept or drop a step together, by one gradient norm; tensor and pipeline parallelism "
            "are not supported",
            fix=f'the same mesh= for every fully_shard(): init_device_mesh(device, ({size},)), or replicas x shards: '
            f'init_device_mesh(device, (2, {max(size // 2, 1)}), mesh_dim_names=("replicate", "shard"))',
        )  # fmt: skip
    if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        raise ConfigError(
            "the model is wrapped in DDP and sharded by fully_shard",
            why="gradients would be averaged twice",
            fix="use fully_shard alone; for replicas of shards give it a mesh with two dimensions",
        )
    if sharded[0].device.type != mesh.device_type:
        raise ConfigError(
            f"weights are on {sharded[0].device.type}, the mesh on {mesh.device_type}: they are offloaded",
            why="the step would be checked and committed on the host",
            fix="call fully_shard(...) without offload_policy=",
        )
    own = {id(p) for p in model.parameters()}
    strangers = sum(id(p) not in own for p in trained)
    if strangers:
        raise ConfigError(
            f"{strangers} of {len(trained)} trained parameters do not belong to the sharded model",
            why="fully_shard replaces parameters: an optimizer created earlier trains the old ones, without effect",
            fix="create the optimizer after the last fully_shard(); if a loss function has parameters: "
            "hs.Step(torch.nn.ModuleList([model, criterion]), optimizer)",
        )


def refuse_differing_steps(world: World, optimizers: Sequence[Optimizer], settings: Mapping[str, Any]) -> None:
    """Refuse steps whose settings differ between ranks."""
    own = {"halfstep": __version__, "torch": torch.__version__, **settings}
    own |= {"optimizers": ", ".join(type(optimizer).__name__ for optimizer in optimizers)}
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    for key in {key: None for group in groups for key in group if key != "params"}:
        own |= {key: [_read_setting(group.get(key)) for group in groups]}
    refuse_differing_settings(
        world, own, why="the weights of the ranks would diverge", fix="give hs.Step the same arguments on every rank"
    )  # fmt: skip


def _read_setting(value: object) -> object:
    """Return a setting as numbers and strings alone: a tensor would also show its device, a function its address."""
    if isinstance(value, tuple):
        return tuple(map(_read_setting, value))
    if isinstance(value, Tensor) and value.numel() == 1:
        return float(value)
    return value if isinstance(value, (float, int, str, type(None))) else type(value).__name__


def refuse_differing_settings(world: World, own: Mapping[str, Any], *, why: str, fix: str) -> None:
    """Compare settings over all ranks; raise the same error on every rank if they differ."""
    first, *others = world.gather({name: str(value) for name, value in own.items()})
    for rank, other in enumerate(others, 1):
        keys = [key for key in first | other if first.get(key) != other.get(key)]
        if keys:
            shown = "; ".join(f"{key}: {first.get(key)} and {other.get(key)}" for key in keys[:MOST_NAMES])
            raise mark_agreed(ConfigError(f"rank 0 and rank {rank} differ in {shown}", why=why, fix=fix))


def refuse_differing_rates(facts: object, reading: Reading) -> None:
    """Refuse learning rates that differ between ranks, as after a scheduler that saw only one rank's metric."""
    for rank, rate in enumerate(reading.rates):
        if not math.isclose(rate, reading.rates[0], rel_tol=1e-6):
            raise mark_agreed(
                ConfigError(
                    f"learning rates differ at step {reading.attempted}: {reading.rates[0]:g} on rank 0, "
                    f"{rate:g} on rank {rank}",
                    why="the weights of the ranks diverge from there",
                    fix="set the same rate on every rank; average a scheduler's metric over all ranks first: "
                    "dist.all_reduce(score) before step.validated(score)",
                )
            )
