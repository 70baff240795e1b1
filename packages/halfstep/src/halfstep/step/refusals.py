"""Refuse models that are not trained by one device, DDP or FSDP2, and losses and gradients that no step can use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.distributed.sharding import is_sharded
from halfstep.errors import ConfigError
from halfstep.step.flat import get_dtype

SHARDED = {"FullyShardedDataParallel", "DeepSpeedEngine"}
"""By name: importing these classes takes seconds."""


def refuse_spread(model: nn.Module, trained: Sequence[Tensor]) -> None:
    """Refuse models over several devices of one process, and sharded ones."""
    for module in model.modules():
        if isinstance(module, nn.DataParallel) and len(module.device_ids) > 1:
            raise _make_error(
                f"DataParallel spreads the model over {len(module.device_ids)} devices",
                "statistics that its copies write are lost, and are not checked",
            )
        if names := SHARDED & {kind.__name__ for kind in type(module).__mro__}:
            raise ConfigError(
                f"the model is sharded by {names.pop()}",
                why="its flat parameters hide which gradients a rank has",
                fix="shard it with FSDP2: from torch.distributed.fsdp import fully_shard; for block in model.blocks: "
                "fully_shard(block); then fully_shard(model)",
            )
    devices = {p.device for p in trained} | {p.device for p in model.parameters() if p.is_cuda}
    if len(devices) > 1:
        raise _make_error(
            f"the model is on {', '.join(sorted(map(str, devices)))}", "a step has one verdict, on one device"
        )


def _make_error(what: str, why: str) -> ConfigError:
    return ConfigError(
        what,
        why=why,
        fix="run one rank per device, each with the whole model: torchrun --nproc_per_node=NUM_GPUS train.py, with "
        "model = DistributedDataParallel(model), or fully_shard(model) if it is too large; CUDA_VISIBLE_DEVICES=1,2 "
        "chooses the GPUs. Workloads: halfstep train ... --gpus 2, and train.shard=true",
    )


def refuse_sharded(model: nn.Module) -> None:
    """Refuse a sharded model in a step that does not know its other ranks."""
    if is_sharded(model):
        raise ConfigError(
            f"{type(model).__name__} is sharded, and this step is for a single rank",
            why="a rank that checks only its own shards would drop different steps from the other ranks",
            fix="hs.Step(model, optimizer) finds the ranks of a sharded model",
        )


def check_parameters(parameters: list[Tensor]) -> list[Tensor]:
    if not parameters:
        raise ConfigError("the optimizer has no parameters", fix="pass it model.parameters()")
    if torch.float16 not in map(get_dtype, parameters):
        return parameters
    half = [p for p in parameters if p.dtype == torch.float16 and p.requires_grad]
    if half:
        raise ConfigError(
            f"{len(half)} trained parameters are stored in fp16, the first of shape {tuple(half[0].shape)}",
            why="their gradients cannot be unscaled, and updates below 6e-8 vanish",
            fix="keep weights in fp32 (model.float()); precision 'fp16' casts them for the computation",
        )
    return parameters


def refuse_unfit_loss(loss: Any) -> None:
    """Refuse a loss that is not one real number with a gradient."""
    if not isinstance(loss, Tensor):
        raise ConfigError(
            f"the loss is {'None' if loss is None else f'a {type(loss).__name__}'}, not a tensor",
            why="the step takes the gradient of what the loss function returns",
            fix="return loss, or (loss, weight), without .item() or float(); of a model's output, "
            "output.loss; of several losses, their sum",
        )
    if loss.numel() != 1 or loss.is_complex():
        kind = "complex" if loss.is_complex() else "real"
        raise ConfigError(
            f"the loss is {kind} and has the shape {tuple(loss.shape)}",
            why="the gradient needs a single real number; a tuple must be (loss, weight)",
            fix="return one number: loss.mean() or loss.sum(); for a complex loss, loss.abs()",
        )
    if not loss.requires_grad:
        raise ConfigError(
            "the loss depends on no trained parameter",
            why="it was detached, computed under torch.no_grad(), or by a model whose weights are all frozen",
            fix="compute it with the model that is trained, without .detach() and no_grad()",
        )


def refuse_sparse(parameters: Sequence[Tensor]) -> None:
    if any(p.grad is not None and p.grad.is_sparse for p in parameters):
        raise ConfigError(
            "a gradient is sparse, and several ranks train",
            why="halfstep cannot check sparse gradients that DDP reduces",
            fix="nn.Embedding(..., sparse=False), or train on one rank",
        )


def refuse_half_sums(trained: Sequence[Tensor], accumulate: int, ranks: object) -> None:
    """Refuse accumulation of bf16 gradients on ranks: DDP and FSDP sum in the parameter's dtype, and lose small
    terms."""
    if ranks is not None and accumulate > 1 and any(p.dtype == torch.bfloat16 for p in trained):
        raise ConfigError(
            f"accumulate={accumulate} does not work with bf16 weights on several ranks",
            why="DDP and FSDP would sum the window's gradients in bf16",
            fix="use a larger batch without accumulation, or fp32 weights (precision bf16)",
        )
