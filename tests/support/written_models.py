"""Models that write more than their buffers in forward, and what a bad step must leave of them."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Codebook(nn.Module):
    """A parameter without gradients that follows the data, as VQ-VAE's codebook does, written in the way named."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.inner, self.way = nn.Linear(4, 4), way
        self.code = nn.Parameter(torch.zeros(4), requires_grad=False)
        self.start = 0
        """The step from which on the code is written."""
        self.num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x)
        self.num_calls += 1
        if self.num_calls > self.start:
            self.write(h.detach().mean(0))
        return (h - self.code).square().mean()

    @torch.no_grad()
    def write(self, target: Tensor) -> None:
        if self.way == "replaced":
            self.code = nn.Parameter(0.9 * self.code + 0.1 * target, requires_grad=False)
        elif self.way == "in place":
            self.code.mul_(0.9).add_(0.1 * target)
        elif self.way == "through data":
            self.code.data.mul_(0.9).add_(0.1 * target)
        elif self.way == "other storage":
            self.code.data = 0.9 * self.code.data + 0.1 * target
        else:
            raise ValueError(self.way)


WAYS = ("replaced", "in place", "through data", "other storage")


class Momentum(nn.Module):
    """An encoder and its slow copy, moved inside forward, both with BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.fast, self.slow = (nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(2))
        self.slow.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for slow, fast in zip(self.slow.parameters(), self.fast.parameters(), strict=True):
            slow.data = slow.data * 0.9 + fast.data * 0.1
        return (self.fast(x) - self.slow(x)).square().mean()


class Clamped(nn.Module):
    """A trained weight that forward keeps within bounds."""

    def __init__(self, *, through_data: bool) -> None:
        super().__init__()
        self.weight, self.through_data = nn.Parameter(torch.linspace(-2, 2, 4)), through_data

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            (self.weight.data if self.through_data else self.weight).clamp_(-1, 1)
        return (x * self.weight).square().mean()


class Late(nn.Module):
    """Registers what the flag says in its first forward pass."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.inner, self.what = nn.Linear(4, 4), what

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x)
        if self.what == "module":
            if not hasattr(self, "norm"):
                self.norm = nn.BatchNorm1d(4, device=h.device)
            return self.norm(h).pow(3).mean()
        if not hasattr(self, "stat"):
            self.register_buffer("stat", torch.zeros(4, device=h.device), persistent=self.what == "buffer")
        self.stat.mul_(0.9).add_(0.1 * h.detach().mean(0))
        return (h - self.stat).square().mean()


def good(seed: int = 0, size: int = 8, device: str = "cpu") -> Tensor:
    return torch.randn(size, 4, generator=torch.Generator().manual_seed(seed)).to(device)


def spoiled(seed: int = 99, size: int = 8, device: str = "cpu") -> Tensor:
    x = good(seed, size, device)
    x[0, 0] = float("nan")
    return x


def state_of(*modules: nn.Module) -> dict[str, Tensor]:
    """Cloned: weights and all buffers, also those that are not stored."""
    found = {}
    for number, module in enumerate(modules):
        named = (*module.named_parameters(), *module.named_buffers())
        found |= {f"{number}.{name}": value.detach().clone() for name, value in named}
    return found
