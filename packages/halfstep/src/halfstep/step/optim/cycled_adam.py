"""Adam and AdamW whose first beta is on the device, because a schedule cycles it (OneCycleLR, CyclicLR).

torch's fused kernel, and its foreach form, take betas as numbers from the host: a CUDA graph would freeze them. This is
the capturable foreach form with the same operations, but for the first moment, which `_foreach_lerp_` cannot update
with a weight on the device, and the first bias correction. Their last bits differ.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from halfstep.distributed.sharding import has_dtensor


def takes_tensor_betas(optimizer: Optimizer) -> bool:
    """True if `step_cycled_adam` can step this optimizer: Adam or AdamW of real numbers that are not sharded."""
    groups = optimizer.param_groups
    parameters = [p for group in groups for p in group["params"]]
    is_plain = not any(group.get("differentiable") for group in groups) and not has_dtensor(parameters)
    is_real = all(p.is_floating_point() for p in parameters)
    return type(optimizer) in (torch.optim.Adam, torch.optim.AdamW) and is_plain and is_real


def step_cycled_adam(optimizer: Any) -> None:
    for group in optimizer.param_groups:
        held: list[list[Tensor]] = [[] for _ in range(6)]
        optimizer._init_group(group, *held)
        parameters, gradients, means, squares, largest, steps = held
        if not parameters:
            continue
        beta1, beta2 = group["betas"]
        lr, decay = group["lr"], group["weight_decay"]
        if group["maximize"]:
            gradients = list(torch._foreach_neg(gradients))
        torch._foreach_add_(steps, 1)
        if decay and group["decoupled_weight_decay"]:
            torch._foreach_mul_(parameters, 1 - lr * decay)
        elif decay:
            gradients = list(torch._foreach_add(gradients, parameters, alpha=decay))
        change = torch._foreach_sub(gradients, means)
        torch._foreach_mul_(change, 1 - beta1)
        torch._foreach_add_(means, change)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - beta2)
        # The bias corrections of all parameters in one vector: a parameter without a gradient has made fewer steps.
        counts = torch.stack(steps)
        sizes = (lr / (beta1**counts - 1)).unbind()
        roots = (1 - beta2**counts).sqrt().unbind()
        if group["amsgrad"]:
            torch._foreach_maximum_(largest, squares)
        divisors = torch._foreach_sqrt(largest or squares)
        torch._foreach_div_(divisors, roots)
        torch._foreach_add_(divisors, group["eps"])
        torch._foreach_div_(divisors, sizes)
        torch._foreach_addcdiv_(parameters, means, divisors)
