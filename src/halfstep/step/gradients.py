"""Gradients of a window: the formats they add up in, who scales them, and that nobody edits them in between."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from halfstep.errors import ConfigError
from halfstep.step.commit import Committer, numbers


def choose_types(optimizers: Sequence[Optimizer], num_micro_batches: int) -> None:
    """Gradients of bf16 weights are bf16; those of several micro-batches add up in fp32 where the optimizer reads that,
    since a sum in bf16 loses what is small beside it. A user's own optimizer gets what torch gives it."""
    wanted = torch.bfloat16 if num_micro_batches == 1 else torch.float32
    ours = (o for o in optimizers if getattr(o, "takes_fp32_gradients", False))
    for parameter in (p for optimizer in ours for group in optimizer.param_groups for p in group["params"]):
        if parameter.dtype == torch.bfloat16 and parameter.grad_dtype != wanted:
            parameter.grad_dtype = wanted


def numbers_of(parameters: Sequence[Tensor]) -> list[Tensor]:
    """The gradients; of a sparse one the numbers that it holds, each row once, as they lie in it."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not any(gradient.is_sparse for gradient in gradients):
        return gradients
    for parameter in parameters:
        if parameter.grad is not None and parameter.grad.is_sparse:
            parameter.grad = parameter.grad.coalesce()  # rows that came twice are judged and clipped as their sum
    return [numbers(p.grad) for p in parameters if p.grad is not None]


def are_scaled_in_kernels(committers: Sequence[Committer], parameters: Sequence[Tensor]) -> bool:
    """Whether the optimizers' kernels scale the gradients as they read them, which saves a pass over all of them.

    They divide by the inverse, a rounding away from the multiplication wherever the factor is not a power of two; on a
    CPU, where a pass costs little, a step keeps the very bits of a plain loop. And they write the gradients back, so
    that a second optimizer of the same parameter would scale them twice."""
    on_gpu = bool(parameters) and parameters[0].device.type == "cuda"
    in_kernels = on_gpu and all(c.method == "found_inf" for c in committers)
    held = sum(len(group["params"]) for c in committers for group in c.optimizer.param_groups)
    return in_kernels and held == len(parameters)


class Judged:
    """The gradients that a verdict is about: what it was not about must not be committed."""

    def __init__(self, parameters: Sequence[Tensor] = ()) -> None:
        self._seen = [(p, p.grad, 0 if p.grad is None else p.grad._version) for p in parameters]

    def refuse_edited(self) -> None:
        if any(p.grad is not g or g is not None and g._version != version for p, g, version in self._seen):
            raise ConfigError(
                "gradients were changed between compute() and commit(): the step is dropped",
                why="norm and verdict are of the gradients that compute() left; these were never judged",
                fix="edit them in a hook: hs.Step(..., on_gradients=edit), where edit(model) changes .grad in place, "
                "unscaled and before clipping",
            )
