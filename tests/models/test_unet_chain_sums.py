"""A U-Net's chain where convolutions sum for the BatchNorms next to them, with a stand-in for the Hopper kernel.

That kernel has no interpreter (tests/gpu hold it against torch). Whose sums go where can be seen without it.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from halfstep.kernels import chain
from halfstep.kernels.fast_forms import forced
from halfstep.kernels.normalise import Norm
from halfstep.models.recompute import Recompute, set_recompute
from halfstep.models.unet import UNet

pytest.importorskip("triton")

ROWS = 4


def summing_rows(z: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    y = F.conv2d(z, w, padding=1).contiguous(memory_format=torch.channels_last)
    return y, torch.stack([part for image in y for part in map(part_of, image.split(ROWS, dim=1))])


def part_of(rows: Tensor) -> Tensor:
    """Σ d, Σ d², the shift and the count of [channels, rows, width]."""
    shift = rows[:, 0].mean(1)
    d = rows.flatten(1) - shift[:, None]
    return torch.stack([d.sum(1), d.square().sum(1), shift, torch.full_like(shift, d.shape[1])])


def summing_gradient(dy: Tensor, w: Tensor, y: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
    dz = F.conv_transpose2d(dy, w, padding=1).contiguous(memory_format=torch.channels_last)
    mean, _, scale, offset = (vector[:, None, None] for vector in norm)
    g = torch.where(y * scale + offset <= 0, 0.0, dz)
    return dz, torch.stack([g.sum((2, 3)), (g * (y - mean)).sum((2, 3))], dim=1)


def step(model: nn.Module, image: Tensor, recompute: Recompute = "none") -> list[Tensor]:
    """Logits, gradients and running statistics."""
    model = copy.deepcopy(model)
    set_recompute(model, recompute)
    with forced(True, "chain"):
        logits = model(image)
    return [logits.detach(), *torch.autograd.grad(logits.square().mean(), list(model.parameters())), *model.buffers()]


def test_sums_of_convolutions_reach_the_norms_of_their_maps(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model: nn.Module = UNet(base_channels=4, depth=2).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    image = torch.randn(2, 3, 9, 11).contiguous(memory_format=torch.channels_last)
    expected = step(model, image)
    monkeypatch.setattr(chain, "row_convolution_fits", lambda _, w, *how: w.shape[0] == w.shape[1])
    monkeypatch.setattr(chain, "convolved_rows", summing_rows)
    monkeypatch.setattr(chain, "row_gradient", summing_gradient)
    found = step(model, image)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5 * theirs.abs().max().item())
    assert all(map(torch.equal, found, step(model, image, "pointwise")))
