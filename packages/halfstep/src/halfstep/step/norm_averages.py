"""Average BatchNorm's running statistics cumulatively in the first steps.

torch moves them by `momentum`, 0.1, from mean 0 and variance 1: after ten steps 35 % of a running variance is still the
initial 1, and a model that trains well validates badly. With momentum max(0.1, 1/n) in the n-th step they are the plain
means of the first ten steps.

A momentum that changes is not an option: compiled code would be made anew at every step, and a CUDA graph would keep
the first one. So forward moves the statistics as ever, r' = r + m·(s - r), and the step then moves them further by
(r' - r)·(1/(m·n) - 1), which gives r + (s - r)/n. From the tenth step on this adds 0 and changes no bit. All of it is
done on the device, for all layers together, and only n, BatchNorm's own count of batches, is read: a resumed or
pretrained model goes on where it was. A layer that runs c times in a step has n ≥ c, and 1 - (1 - m)^c ≤ c·m, so that
it is never moved beyond s.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


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

    def _list_held(self) -> list[Tensor]:
        held = [n.running_mean for n in self.norms] + [n.running_var for n in self.norms]
        return [tensor for tensor in held if tensor is not None]

    @torch.no_grad()
    def save(self) -> None:
        """Keep the statistics before the first forward pass of a window."""
        if self.norms:
            torch.cat(self._list_held(), out=self._before)

    @torch.no_grad()
    def settle(self) -> None:
        """Move the statistics on, after the last backward pass of a window and before its verdict."""
        if not self.norms:
            return
        held = self._list_held()
        num_batches = torch.stack([norm.num_batches_tracked for norm in self.norms])  # type: ignore[misc]
        # A layer that has not run yet has moved by 0.
        further = (1 / (num_batches.clamp_min(1) * self._momenta) - 1).clamp_min(0)
        moved = torch.cat(held).sub_(self._before).mul_(further[self._layers])
        torch._foreach_add_(held, list(moved.split(self._sizes)))
        # The first difference is one to 1: rounding could leave a tiny variance below 0.
        torch._foreach_clamp_min_(held[len(self.norms) :], 0.0)


def _is_moved(norm: _BatchNorm) -> bool:
    """True if a layer has running statistics in fp32, and a momentum: without one they are plain means already."""
    return norm.momentum is not None and norm.running_mean is not None and norm.running_mean.dtype == torch.float32
