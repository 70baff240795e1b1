"""Networks compiled by their blocks: eager results, one compilation for blocks of a shape, classes left as found."""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from halfstep.tune.repeated import by_blocks


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(width))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.sin(x * self.scale)


class Halved(Block):
    """Inherits its forward."""


def test_blocks_of_one_shape_share_their_code() -> None:
    torch.manual_seed(0)
    torch.compiler.reset()
    model = nn.Sequential(*(Block(4) for _ in range(5)), nn.Linear(4, 6), Block(6), Halved(6))
    x, forward = torch.randn(2, 4, requires_grad=True), Block.forward
    expected = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    before = counters["stats"]["unique_graphs"]
    compiler = functools.partial(torch.compile, backend="eager", dynamic=False)
    region = by_blocks(lambda batch: model(batch).square().sum(), (Block, Halved), compiler)
    found = torch.autograd.grad(region(x), list(model.parameters()))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
    assert counters["stats"]["unique_graphs"] - before <= 3, "two shapes, and the class that inherits"
    assert Block.forward is forward
