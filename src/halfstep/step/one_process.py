"""One process, one device: what a step cannot train yet is refused before it could part in silence."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from halfstep.errors import ConfigError

SHARDED = {"FullyShardedDataParallel", "FSDPModule", "DeepSpeedEngine"}
"""By name: importing them takes seconds, and who has such a model has imported them."""


def refuse_many_processes(model: nn.Module, trained: Sequence[Tensor]) -> None:
    """Each rank would judge its own losses, and drop, clip and schedule steps that the others commit."""
    world = _world_size()
    if world > 1:
        raise _refusal(f"torch.distributed runs {world} processes", "each would drop, clip and scale steps by itself")
    for module in model.modules():
        if isinstance(module, nn.DataParallel) and len(module.device_ids) > 1:
            raise _refusal(f"DataParallel spreads the model over {len(module.device_ids)} devices",
                           "statistics that its copies write are lost, and no verdict is about them")  # fmt: skip
        if names := SHARDED & {kind.__name__ for kind in type(module).__mro__}:
            raise _refusal(f"the model is sharded by {names.pop()}", "each process sees a part of its gradients only")
    devices = {p.device for p in trained} | {p.device for p in model.parameters() if p.is_cuda}
    if len(devices) > 1:
        raise _refusal(
            f"the model lies on {', '.join(sorted(map(str, devices)))}", "a step has one verdict, on one device"
        )


def _world_size() -> int:
    distributed = torch.distributed
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def _refusal(what: str, why: str) -> ConfigError:
    return ConfigError(
        what,
        why=f"halfstep trains in one process on one device so far: {why}",
        fix="start one process (python train.py, or torchrun --nproc_per_node=1) with the plain model on one device",
    )
