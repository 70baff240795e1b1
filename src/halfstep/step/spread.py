"""A step has one device and a whole model: what is spread otherwise than by DDP is refused before it trains."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from halfstep.errors import ConfigError

SHARDED = {"FullyShardedDataParallel", "FSDPModule", "DeepSpeedEngine"}
"""By name: importing them takes seconds, and who has such a model has imported them."""


def refuse_spread(model: nn.Module, trained: Sequence[Tensor]) -> None:
    """Models over several devices of one process, and sharded ones."""
    for module in model.modules():
        if isinstance(module, nn.DataParallel) and len(module.device_ids) > 1:
            raise _refusal(
                f"DataParallel spreads the model over {len(module.device_ids)} devices",
                "statistics that its copies write are lost, and no verdict is about them",
            )
        if names := SHARDED & {kind.__name__ for kind in type(module).__mro__}:
            raise _refusal(f"the model is sharded by {names.pop()}", "each process sees a part of its gradients only")
    devices = {p.device for p in trained} | {p.device for p in model.parameters() if p.is_cuda}
    if len(devices) > 1:
        raise _refusal(
            f"the model lies on {', '.join(sorted(map(str, devices)))}", "a step has one verdict, on one device"
        )


def _refusal(what: str, why: str) -> ConfigError:
    return ConfigError(
        what,
        why=why,
        fix="one process a device, each with the whole model: torchrun --nproc_per_node=NUM_GPUS train.py, with "
        "model = DistributedDataParallel(model)",
    )
