"""Workspaces of strict fp32 convolutions: the formulas against what an H200 took (cuDNN 9.19)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from halfstep_train.run.memory.step_trace import (
    AllocationRecorder,
    Convolution,
    count_fft_bytes,
    count_tiled_fft_bytes,
    count_winograd_bytes,
    find_workspace_bytes,
)


@pytest.mark.parametrize(
    ("count", "shape", "measured"),
    [
        (count_fft_bytes, Convolution(8, 1024, 1024, 32, 32, 3), 35_748_052_992),
        (count_fft_bytes, Convolution(16, 256, 128, 32, 32, 3), 1_246_887_936),
        (count_fft_bytes, Convolution(64, 128, 128, 28, 28, 3), 214_499_328),
        (count_tiled_fft_bytes, Convolution(8, 128, 128, 64, 64, 3), 89_128_960),
        (count_tiled_fft_bytes, Convolution(16, 128, 256, 96, 96, 3), 196_083_712),
        (count_winograd_bytes, Convolution(8, 64, 64, 256, 256, 3), 604_569_600),
        (count_winograd_bytes, Convolution(64, 512, 512, 7, 7, 3), 75_497_472),
        (count_winograd_bytes, Convolution(2, 128, 3, 256, 256, 3), 154_589_184),
    ],
)
def test_each_algorithm_takes_what_was_measured(
    count: Callable[[Convolution], int], shape: Convolution, measured: int
) -> None:
    assert count(shape) == pytest.approx(measured, rel=0.01)


def test_a_shape_between_two_that_were_asked_for_takes_the_algorithm_of_the_nearest() -> None:
    near, asked = Convolution(8, 64, 64, 250, 260, 3), Convolution(8, 64, 64, 256, 256, 3)
    assert find_workspace_bytes(asked, "weight gradient") == count_winograd_bytes(asked)
    assert find_workspace_bytes(near, "weight gradient") == count_winograd_bytes(near)
    assert find_workspace_bytes(asked._replace(taps=1), "weight gradient") == 0


@pytest.mark.parametrize(("stride", "is_strict", "is_large"), [(1, True, True), (2, True, False), (1, False, False)])
def test_only_strict_convolutions_of_stride_one_take_it(stride: int, is_strict: bool, is_large: bool) -> None:
    layer, x = nn.Conv2d(64, 64, 3, stride=stride, padding=1), torch.randn(2, 64, 16, 16)
    with AllocationRecorder([x, *layer.parameters()], layer.parameters(), is_strict=is_strict) as recorder:
        loss = layer(x).sum()
        recorder.in_backward = True
        loss.backward()
    [found] = [op.workspace_bytes for op in recorder.trace.ops if op.name == "convolution_backward"]
    assert (found == count_winograd_bytes(Convolution(2, 64, 64, 16, 16, 3))) == is_large
    assert bool(found) == is_large
