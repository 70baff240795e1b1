"""Average BatchNorm's running statistics faster in the first steps.

torch moves them by `momentum`, 0.1, from mean 0 and variance 1: after ten steps 35 % of a running variance is still the
initial 1, and a model that trains well validates badly. Here the n-th step moves them by max(momentum, 8/(n + 7)): the
first one replaces the initial values, and later ones weight recent steps more, on average those of n/9 steps ago,
because the weights change fast (Shamir and Zhang 2013, polynomial-decay averaging). From step 73 on this is torch's
0.1. The plain mean, 1/n, validates worse on small data: benchmarks/norm_averages.py compares them.

A momentum that changes is not an option: compiled code would be made anew at every step, and a CUDA graph would keep
the first one. So forward moves the statistics as ever, and the step then moves them further in the same direction. A
layer that runs c times in a step moves by the share 1 - (1 - m)^c of the way, and should move by 1 - (1 - a)^c, where
a is the momentum above: the ratio of both is 1 when a = m, which changes no bit. All of it is done on the device, for
all layers together, and only n, BatchNorm's own count of batches, is read: a resumed or pretrained model goes on where
it was.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

RECENCY = 8
"""8 in 8/(n + 7); 1 would give the plain mean."""


class NormAverages:
    def __init__(self, model: nn.Module) -> None:
        self.norms = [module for module in model.modules() if isinstance(module, _BatchNorm) and _is_moved(module)]
        if not self.norms:
            return
        held = self._list_held()
        self._sizes = [tensor.numel() for tensor in held]
        device = held[0].device
        # Means of all layers, then their variances; of each number the layer that it belongs to.
        numbers = torch.arange(len(self.norms), device=device).repeat(2)
        sizes, total = torch.tensor(self._sizes, device=device), sum(self._sizes)
        self._layers = numbers.repeat_interleave(sizes, output_size=total)
        self._momenta = torch.tensor([norm.momentum for norm in self.norms], device=device)
        self._before = torch.empty(total, device=device)
        self._batches_before = torch.empty(len(self.norms), dtype=torch.long, device=device)

    def _list_held(self) -> list[Tensor]:
        held = [n.running_mean for n in self.norms] + [n.running_var for n in self.norms]
        return [tensor for tensor in held if tensor is not None]

    def _list_counts(self) -> list[Tensor]:
        return [norm.num_batches_tracked for norm in self.norms if norm.num_batches_tracked is not None]

    @torch.no_grad()
    def save(self) -> None:
        """Keep the statistics before the first forward pass of a window."""
        if self.norms:
            torch.cat(self._list_held(), out=self._before)
            torch.stack(self._list_counts(), out=self._batches_before)

    @torch.no_grad()
    def settle(self) -> None:
        """Move the statistics on, after the last backward pass of a window and before its verdict."""
        if not self.norms:
            return
        held = self._list_held()
        num_batches = torch.stack(self._list_counts())
        # At least 1: a layer that has not run in this step has moved by 0, and 0/0 would be NaN.
        num_passes = (num_batches - self._batches_before).clamp_min(1)
        wanted = torch.maximum(self._momenta, RECENCY / (num_batches.clamp_min(1) + (RECENCY - 1)))
        further = (1 - (1 - wanted) ** num_passes) / (1 - (1 - self._momenta) ** num_passes) - 1
        moved = torch.cat(held).sub_(self._before).mul_(further[self._layers])
        torch._foreach_add_(held, list(moved.split(self._sizes)))
        # The first difference is one to 1: rounding could leave a tiny variance below 0.
        torch._foreach_clamp_min_(held[len(self.norms) :], 0.0)


def _is_moved(norm: _BatchNorm) -> bool:
    """True if a layer has running statistics in fp32 and a momentum: None takes plain means, and 0 never moves them."""
    return bool(norm.momentum) and norm.running_mean is not None and norm.running_mean.dtype == torch.float32
