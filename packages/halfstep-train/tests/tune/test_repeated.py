"""Networks compiled by their blocks: eager results, one compilation for blocks of a shape, classes left as found."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from halfstep.recompute import Recompute, set_recompute
from halfstep_train.kernels.fast_forms import allow_chains, is_forced_on
from halfstep_train.tune.modes import Blocks, compile_blocks, compile_one_for_all, repeats_blocks
from halfstep_train.workloads.language.gpt2 import build_gpt2


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(width))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.sin(x * self.scale)


class Halved(Block):
    """Inherits its forward."""


def by_itself(block: Block, x: Tensor) -> Tensor:
    """What a captured step runs."""
    assert is_forced_on("group_norm", otherwise=False)
    return x + torch.sin(x * block.scale) + 0.0


COMPILER = functools.partial(torch.compile, backend="eager", dynamic=False)


def gradients(model: nn.Module, region: Any, x: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(region(x), list(model.parameters()))


@pytest.mark.parametrize(
    ("blocks", "captured", "graphs"),
    [({Block: None, Halved: None}, True, 2), ({Block: by_itself}, True, 0), ({Block: by_itself}, False, 1)],
    ids=["one graph for blocks of a shape", "none for a block with its own forward", "the whole region, uncaptured"],
)
def test_blocks_run_in_their_own_form(blocks: Blocks, captured: bool, graphs: int) -> None:
    torch.manual_seed(0)
    torch.compiler.reset()
    model = nn.Sequential(*(Block(4) for _ in range(5)), nn.Linear(4, 6), Block(6), Halved(6))
    x, forward = torch.randn(2, 4, requires_grad=True), Block.forward
    expected = gradients(model, lambda batch: model(batch).square().sum(), x)
    before = counters["stats"]["unique_graphs"]
    region = compile_blocks(lambda batch: model(batch).square().sum(), blocks, COMPILER)
    with allow_chains(on=captured):
        found = gradients(model, region, x)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
    made = counters["stats"]["unique_graphs"] - before
    assert graphs <= made <= graphs + (1 if graphs == 2 else 0), "a class that inherits may have code of its own"
    assert Block.forward is forward


@pytest.mark.parametrize(("how", "graphs"), [("none", 1), ("pointwise", 1), ("blocks", 1), ("alternate", 2)])
def test_a_deep_transformer_that_is_no_chain_compiles_one_block_for_all(how: Recompute, graphs: int) -> None:
    torch.manual_seed(0)
    torch.compiler.reset()
    model = build_gpt2("gpt2", depth=8, heads=2, dim=16, context=8, vocab=20)
    ids = torch.randint(20, (2, 8))
    set_recompute(model, how)
    before = counters["stats"]["unique_graphs"]
    found = gradients(model, compile_one_for_all(lambda ids: model(ids, ids), COMPILER), ids)
    assert counters["stats"]["unique_graphs"] - before == graphs
    for one, other in zip(found, gradients(model, lambda ids: model(ids, ids), ids), strict=True):
        torch.testing.assert_close(one, other)


def test_what_runs_as_a_chain_or_is_shallow_does_not_compile_one_block_for_all() -> None:
    deep, shallow = (build_gpt2("gpt2", depth=depth, heads=2, dim=16, context=8, vocab=20) for depth in (8, 2))
    assert repeats_blocks(deep, "bf16-true")
    assert not repeats_blocks(deep, "bf16"), "a chain of our own kernels"
    assert not repeats_blocks(shallow, "fp32"), "compiled whole"
