"""The check that the row convolution's kernel must pass on each GPU: it sees every result go wrong.

The kernel itself needs a Hopper GPU. Here a twin in torch has its place, right once, and then wrong in one thing.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from halfstep.kernels import row_convolution
from halfstep.kernels.row_convolution import _compare_with_torch, works_on

NAMES = ("convolution", "sum", "sum of squares", "gradient", "sum of gradients", "sum of products")


def twin(wrong: str = "") -> SimpleNamespace:
    """A module with the kernel's functions; `wrong` names the result that is ten percent off."""

    def off(name: str) -> float:
        return 1.1 if name == wrong else 1.0

    def convolve(z: Tensor, w: Tensor, y: Tensor, num_rows: int) -> Tensor:
        y.copy_(F.conv2d(z.float(), w.float(), padding=1) * off("convolution"))
        parts = []
        for rows in y[0].float().split(num_rows, dim=1):
            shift = rows[:, 0].mean(1)
            d = rows.flatten(1) - shift[:, None]
            total, squares = d.sum(1) * off("sum"), d.square().sum(1) * off("sum of squares")
            parts.append(torch.stack([total, squares, shift, torch.full_like(shift, d.shape[1])]))
        return torch.stack(parts)

    def input_gradient(
        dy: Tensor, w: Tensor, dz: Tensor, y: Tensor, vectors: tuple[Tensor, ...], num_rows: int
    ) -> Tensor:
        exact = F.conv_transpose2d(dy.float(), w.float(), padding=1)
        dz.copy_(exact * off("gradient"))
        mean, scale, offset = (vector[:, None, None] for vector in vectors)
        g = torch.where(y * scale + offset > 0, exact, 0)
        sums = g.sum((2, 3)) * off("sum of gradients"), (g * (y - mean)).sum((2, 3)) * off("sum of products")
        return torch.stack(sums, dim=1)

    return SimpleNamespace(convolve=convolve, input_gradient=input_gradient)


def compare(monkeypatch: pytest.MonkeyPatch, kernel: SimpleNamespace) -> None:
    monkeypatch.setitem(sys.modules, "halfstep.kernels.row_convolution_gluon", kernel)
    _compare_with_torch(torch.device("cpu"), torch.bfloat16)


def test_a_right_kernel_passes_whatever_the_default_type(monkeypatch: pytest.MonkeyPatch) -> None:
    compare(monkeypatch, twin())
    torch.set_default_dtype(torch.float64)
    try:
        compare(monkeypatch, twin())
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("wrong", NAMES)
def test_a_kernel_with_one_wrong_result_is_refused_by_its_name(monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    with pytest.raises(AssertionError, match=f"^its {wrong} is wrong"):
        compare(monkeypatch, twin(wrong))


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Exception]]:
    """On a device that says it is Hopper: the comparisons' ends, in this order, and then none more."""
    errors: list[Exception] = []

    def compare(*_: object) -> None:
        if errors:
            raise errors.pop(0)

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda _: None)
    monkeypatch.setattr(row_convolution, "_compare_with_torch", compare)
    works_on.cache_clear()
    yield errors
    works_on.cache_clear()


def test_a_kernel_that_does_not_compile_is_told_once_and_not_used(failing: list[Exception]) -> None:
    failing.append(ValueError("at 3:1: `tma` has no such function\nmore of it"))
    with pytest.warns(UserWarning, match="run in cuDNN.* does not work here: at 3:1: `tma` has no such function$"):
        assert not works_on(torch.device("cuda", 0), torch.bfloat16)
    assert not works_on(torch.device("cuda", 0), torch.bfloat16)


@pytest.mark.parametrize(("before", "switched"), [(0, []), (2, ["default", 2])])
def test_complaints_about_waiting_are_switched_only_where_they_are_on(
    failing: list[Exception], monkeypatch: pytest.MonkeyPatch, before: int, switched: list[object]
) -> None:
    calls: list[object] = []  # each would warn, and where warnings are errors the kernel counted as broken
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: before)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", calls.append)
    assert works_on(torch.device("cuda", 0), torch.bfloat16)
    assert calls == switched


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("Triton Error [CUDA]: out of memory")]
)
def test_want_of_memory_is_no_verdict(failing: list[Exception], error: Exception) -> None:
    failing.append(error)
    with pytest.raises(torch.OutOfMemoryError):
        works_on(torch.device("cuda", 0), torch.bfloat16)
    assert works_on(torch.device("cuda", 0), torch.bfloat16)
