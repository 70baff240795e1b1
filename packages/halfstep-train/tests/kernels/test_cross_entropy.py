"""The chunked linear layer with its cross-entropy against the plain one in fp64."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from halfstep.hardware.memory import LiveBytes
from halfstep.precision.simulate import simulate_kernels
from halfstep_train.kernels.cross_entropy import linear_cross_entropy, replace_logits_by_gradients_

CLASSES, PADDED, ROWS, DIM = 37, 64, 50, 16


def some_rows() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(ROWS, DIM, generator=generator).requires_grad_()
    weight = torch.randn(PADDED, DIM, generator=generator).requires_grad_()
    targets = torch.randint(CLASSES, (ROWS,), generator=generator)
    targets[::7] = -1
    return rows, weight, targets


def plain(rows: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    logits = rows @ weight[:CLASSES].t()
    return F.cross_entropy(logits, targets, ignore_index=-1, reduction="sum")


@pytest.mark.parametrize("chunk_rows", [1, 7, 50, 1000])
def test_loss_and_gradients_in_fp32_equal_the_plain_ones_within_its_rounding(chunk_rows: int) -> None:
    rows, weight, targets = some_rows()
    found = linear_cross_entropy(rows, weight, targets, num_classes=CLASSES, dtype=torch.float32, chunk_rows=chunk_rows)
    (found / 13).backward()
    exact_rows, exact_weight = (t.detach().double().requires_grad_() for t in (rows, weight))
    exact = plain(exact_rows, exact_weight, targets)
    (exact / 13).backward()
    assert found.dtype == torch.float32
    assert found.item() == pytest.approx(exact.item(), rel=1e-6)
    for ours, theirs in ((rows.grad, exact_rows.grad), (weight.grad, exact_weight.grad)):
        assert ours is not None
        assert theirs is not None
        assert float((ours - theirs).norm() / theirs.norm()) < 1e-6
    assert not weight.grad[CLASSES:].any(), "padded rows get no gradient"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_half_formats_only_logits_and_their_gradients_are_rounded(dtype: torch.dtype) -> None:
    """Within two roundings of the format, and no further than the plain autocast loss is."""
    rows, weight, targets = some_rows()
    exact_rows, exact_weight = (t.detach().double().requires_grad_() for t in (rows, weight))
    exact = plain(exact_rows, exact_weight, targets)
    exact.backward()
    with simulate_kernels():
        found = linear_cross_entropy(rows, weight, targets, num_classes=CLASSES, dtype=dtype, chunk_rows=16)
        found.backward()
    bound = 4 * torch.finfo(dtype).eps
    assert found.item() == pytest.approx(exact.item(), rel=bound)
    for ours, theirs in ((rows.grad, exact_rows.grad), (weight.grad, exact_weight.grad)):
        assert ours is not None
        assert theirs is not None
        assert ours.dtype == torch.float32
        assert float((ours - theirs).norm() / theirs.norm()) < bound


def test_a_small_factor_from_above_loses_nothing_in_fp16() -> None:
    """One over a million tokens is below fp16's smallest number; p - y is not multiplied by it before the matmul."""
    rows, weight, targets = some_rows()
    with simulate_kernels():
        found = linear_cross_entropy(rows, weight, targets, num_classes=CLASSES, dtype=torch.float16)
        (found * 1e-8).backward()
        small = rows.grad.clone()  # type: ignore[union-attr]
        rows.grad = None
        linear_cross_entropy(rows, weight, targets, num_classes=CLASSES, dtype=torch.float16).backward()
    torch.testing.assert_close(small, rows.grad * 1e-8, rtol=1e-6, atol=0)  # type: ignore[operator]


def test_nothing_is_kept_and_no_gradient_is_made_where_none_will_be_asked_for() -> None:
    rows, weight, targets = some_rows()
    with torch.no_grad():
        found = linear_cross_entropy(rows, weight, targets, num_classes=CLASSES, dtype=torch.float32)
    assert not found.requires_grad
    frozen = linear_cross_entropy(rows.detach(), weight.detach(), targets, num_classes=CLASSES, dtype=torch.float32)
    assert not frozen.requires_grad


def test_logits_are_never_kept() -> None:
    """What autograd keeps between forward and backward is as large as the two gradients."""
    rows, weight, targets = some_rows()
    kept: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        linear_cross_entropy(rows, weight, targets, num_classes=CLASSES, dtype=torch.float32, chunk_rows=8)
    assert sorted(kept) == sorted([rows.numel(), weight.numel()])


def test_one_chunk_of_logits_is_alive_at_a_time() -> None:
    rows, weight, targets = torch.randn(64, 4), torch.randn(512, 4), torch.zeros(64, dtype=torch.int64)
    peaks = []
    for num_rows in (16, 64):
        with LiveBytes() as live, torch.no_grad():
            of_chunks = {"num_classes": 512, "dtype": torch.float32, "chunk_rows": 16}
            linear_cross_entropy(rows[:num_rows], weight, targets[:num_rows], **of_chunks)  # type: ignore[arg-type]
        peaks.append(live.peak)
    assert peaks[1] - peaks[0] < 16 * 512 * 4 / 2


def test_a_row_that_does_not_count_may_be_infinite() -> None:
    logits = torch.zeros(2, 4)
    logits[0] = float("inf")
    total = replace_logits_by_gradients_(logits, torch.tensor([-1, 2]), 4, True)
    assert float(total) == pytest.approx(1.386294)
    assert not logits[0].any()


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_kernel_gives_its_twins_losses_and_gradients(dtype: torch.dtype) -> None:
    from halfstep_train.kernels import cross_entropy_triton

    generator = torch.Generator().manual_seed(1)
    logits = (torch.randn(9, PADDED, generator=generator) * 5).to(dtype)
    targets = torch.randint(CLASSES, (9,), generator=generator)
    targets[4] = -1
    ours, twins = logits.clone(), logits.clone()
    found = cross_entropy_triton.replace_logits_by_gradients_(ours, targets, CLASSES, True)
    wanted = replace_logits_by_gradients_(twins, targets, CLASSES, True)
    assert found.item() == pytest.approx(float(wanted), rel=1e-6)
    torch.testing.assert_close(ours, twins, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)
