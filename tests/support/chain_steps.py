"""One step of a model that may run as a chain, on a GPU, and how far two of them are apart."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def step(model: nn.Module, x: Tensor, *, half: bool = True) -> tuple[Tensor, ...]:
    """Logits and the gradients of all parameters."""
    with torch.autocast("cuda", torch.bfloat16, enabled=half):
        logits = model(x)
    # Detached: a graph that stays alive would hold on to the stream it was made on.
    return logits.detach(), *torch.autograd.grad(logits.float().square().mean(), list(model.parameters()))


def error(ours: tuple[Tensor, ...], exact: tuple[Tensor, ...]) -> float:
    """Of all gradients together, beside their size."""
    mine, theirs = (torch.cat([value.double().flatten() for value in values]) for values in (ours[1:], exact[1:]))
    return ((mine - theirs).norm() / theirs.norm()).item()
