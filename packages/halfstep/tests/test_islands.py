"""Islands hold under CPU and CUDA autocast alike, eager and compiled."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from halfstep.islands import fp32_island, in_fp32, to_fp32


class Pair(NamedTuple):
    left: Tensor
    right: Tensor


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_on_an_island_are_fp32(dtype: torch.dtype) -> None:
    x = torch.randn(3, 3)
    with torch.autocast("cpu", dtype):
        with fp32_island():
            assert (x @ x).dtype == torch.float32
        assert (x @ x).dtype == dtype


def test_an_island_switches_every_kind_of_device_off() -> None:
    kinds = ("cpu", "cuda", "mps", "xpu")
    before = {kind: torch.is_autocast_enabled(kind) for kind in kinds}
    for kind in kinds:
        torch.set_autocast_enabled(kind, True)
    try:
        with fp32_island():
            assert not any(torch.is_autocast_enabled(kind) for kind in kinds)
        assert all(torch.is_autocast_enabled(kind) for kind in kinds)
    finally:
        for kind, was_on in before.items():
            torch.set_autocast_enabled(kind, was_on)


def test_autocast_is_back_after_an_exception() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        with pytest.raises(ZeroDivisionError), fp32_island():
            _ = 1 / 0
        assert torch.is_autocast_enabled("cpu")


def test_to_fp32_reaches_into_containers_and_leaves_the_rest_alone() -> None:
    half, double, count = torch.ones(1).bfloat16(), torch.ones(1).double(), torch.ones(1).long()
    value = to_fp32({"list": [half, double], "pair": Pair(half, count), "text": "as it was"})
    assert value["list"][0].dtype == value["pair"].left.dtype == torch.float32
    assert value["list"][1] is double
    assert value["pair"].right is count
    assert isinstance(value["pair"], Pair)
    assert value["text"] == "as it was"


@in_fp32
def squared_distance(x: Tensor, *, y: Tensor) -> Tensor:
    """A product, so that autocast would touch it."""
    return (x - y) @ (x - y)


def test_in_fp32_upcasts_arguments_and_keeps_the_name() -> None:
    x = torch.randn(4).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        assert squared_distance(x, y=x + 1).dtype == torch.float32
    assert squared_distance.__name__ == "squared_distance"


def test_gradients_leave_the_island_in_the_inputs_dtype() -> None:
    x = torch.randn(4).bfloat16().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        squared_distance(x, y=torch.zeros(4)).backward()
    assert x.grad.dtype == torch.bfloat16


def test_an_island_holds_inside_a_compiled_graph() -> None:
    def half_then_full(x: Tensor) -> tuple[Tensor, Tensor]:
        product = x @ x
        with fp32_island():
            return product, to_fp32(product) @ x

    x = torch.randn(4, 4)
    compiled = torch.compile(half_then_full, fullgraph=True, backend="aot_eager")
    with torch.autocast("cpu", torch.bfloat16):
        product, island = compiled(x)
        expected = half_then_full(x)
    assert (product.dtype, island.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(island, expected[1])


def test_the_decorator_compiles_too() -> None:
    x = torch.randn(4).bfloat16()
    compiled = torch.compile(lambda x: squared_distance(x, y=x + 1), fullgraph=True, backend="aot_eager")
    with torch.autocast("cpu", torch.bfloat16):
        assert compiled(x).dtype == torch.float32
