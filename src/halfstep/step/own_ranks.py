"""How a model of the user's own takes part in a world: by its DDP. What ranks would part over in silence is refused."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from halfstep import __version__
from halfstep.distributed.world import World, agreed
from halfstep.errors import ConfigError
from halfstep.step.facts import Reading
from halfstep.step.ranks import Ranks

OF_OWN_LOOPS = "start all ranks again from your last checkpoint; torchrun --max-restarts=3 starts them by itself"
SHOWN = 4  # names that a message has room for


def ranks_of(model: nn.Module, trained: Sequence[Tensor], device: torch.device) -> Ranks | None:
    """The step's part in the world; None where there is neither a world nor a DDP."""
    size = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    wrapped = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
    if size > 1:
        _refuse_unwrapped(model, trained, wrapped, size)
    if not wrapped:
        return None
    patience_s = c10d._get_default_group()._get_backend(device).options._timeout.total_seconds()
    return Ranks(World(limit_s=patience_s, limit_name="", go_on=OF_OWN_LOOPS), wrapped, device)


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
        shown = ", ".join(names.get(id(p), f"one of shape {tuple(p.shape)}") for p in outside[:SHOWN])
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
    first, *others = world.gathered({name: str(value) for name, value in own.items()})
    for rank, other in enumerate(others, 1):
        keys = [key for key in first | other if first.get(key) != other.get(key)]
        if keys:
            shown = "; ".join(f"{key}: {first.get(key)} and {other.get(key)}" for key in keys[:SHOWN])
            raise agreed(ConfigError(f"rank 0 and rank {rank} differ in {shown}", why=why, fix=fix))


def refuse_other_rates(facts: object, reading: Reading) -> None:
    """A learning rate that one rank was given alone, as by a scheduler that saw its own score."""
    for rank, rate in enumerate(reading.rates):
        if not math.isclose(rate, reading.rates[0], rel_tol=1e-6):
            raise agreed(
                ConfigError(
                    f"learning rates differ at step {reading.attempted}: {reading.rates[0]:g} on rank 0, "
                    f"{rate:g} on rank {rank}",
                    why="the weights of the ranks part from there",
                    fix="set it alike on every rank; a score that a scheduler sees must be that of all ranks: "
                    "dist.all_reduce(score) before step.validated(score)",
                )
            )
