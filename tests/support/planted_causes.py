"""Small models with one fault each, as they are met in the field."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Batch = dict[str, Tensor]


class Around(nn.Module):
    """A sound network with one part in its midst."""

    def __init__(self, part: nn.Module, size: int = 8) -> None:
        super().__init__()
        self.stem, self.part, self.head = nn.Linear(size, size), part, nn.Linear(size, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.part(self.stem(x)))


class HalfFft(nn.Module):
    """No GPU list of autocast upcasts an FFT."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.rfft(x, n=14).abs()


class LinearAttention(nn.Module):
    """Normalises by a sum that fp16 flushes to zero."""

    def __init__(self, size: int = 8) -> None:
        super().__init__()
        self.query = nn.Linear(size, size)

    def forward(self, x: Tensor) -> Tensor:
        weights = self.query(x).abs() * 1e-9
        return weights / weights.sum(-1, keepdim=True)


class Attention(nn.Module):
    """Adds -1e9 where nothing may be seen, in the scores' own format; the first row may see nothing."""

    def __init__(self, size: int = 8) -> None:
        super().__init__()
        self.key = nn.Linear(size, size)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.key(x) @ x.to(self.key(x).dtype).T
        may_see = torch.ones_like(scores).tril(-1)
        return torch.softmax(scores + (1 - may_see) * -1e9, -1) @ x.float()


class Variational(nn.Module):
    """exp of a log-variance that nobody bounds."""

    def __init__(self, size: int = 8, bias: float = 100.0) -> None:
        super().__init__()
        self.logvar = nn.Linear(size, size)
        nn.init.constant_(self.logvar.bias, bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.exp(self.logvar(x).float())


def dice(logits: Tensor, target: Tensor) -> Tensor:
    """Sums over many pixels as a product, which autocast runs in half."""
    p = torch.sigmoid(logits)
    hits, total = torch.einsum("bn,bn->b", p, target), torch.einsum("bn,bn->b", p + target, torch.ones_like(p))
    return (1 - 2 * hits / total).mean()


def batch_of(rows: int = 6, size: int = 8) -> Batch:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(rows, size, generator=generator)
    return {"x": x, "y": torch.arange(rows) % 2, "index": torch.arange(rows) + 10}


def loss_of(model: nn.Module) -> Any:
    return lambda batch: F.cross_entropy(model(batch["x"]).float(), batch["y"])
