"""When a 3×3 convolution runs in our own kernel, how its statistics are merged, and that the kernel compiles."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys

import pytest
import torch
from torch import nn

from halfstep.kernels.normalise import normalisation
from halfstep.kernels.row_convolution import PIXELS, row_convolution_fits, rows_for_each

H200_PROCESSORS = 132


@pytest.mark.parametrize(("num_images", "size", "rows"), [(8, 512, 128), (8, 256, 32), (16, 512, 256), (1, 2048, 256)])
def test_programs_fill_an_h200_and_end_together(num_images: int, size: int, rows: int) -> None:
    found = rows_for_each(num_images, size, size, H200_PROCESSORS)
    assert found == rows
    num_programs = num_images * size // PIXELS * size // rows
    assert num_programs % H200_PROCESSORS > 0.9 * H200_PROCESSORS


@pytest.mark.parametrize(
    ("num_images", "height", "width"),
    [(8, 128, 128), (1, 256, 256), (64, 512, 160), (8, 16, 512)],
    ids=["too small", "one image", "strips half empty", "fewer rows than a program should have"],
)
def test_an_image_that_leaves_processors_idle_is_left_to_the_library(num_images: int, height: int, width: int) -> None:
    assert rows_for_each(num_images, height, width, H200_PROCESSORS) is None


@pytest.mark.parametrize("height", [32, 33, 100, 511, 513, 2000])
def test_rows_are_never_fewer_than_worth_a_program(height: int) -> None:
    for num_images in range(1, 40):
        rows = rows_for_each(num_images, height, 512, H200_PROCESSORS)
        assert rows is None or 32 <= rows <= height


def test_on_the_cpu_the_library_is_asked() -> None:
    z, w = torch.zeros(1, 64, 1, 1, dtype=torch.bfloat16), torch.zeros(64, 64, 3, 3, dtype=torch.bfloat16)
    z = z.expand(8, 64, 512, 512)
    assert not row_convolution_fits(z, w.contiguous(memory_format=torch.channels_last), 1, 1)


@pytest.mark.parametrize("mean", [0.0, 3.0, 1000.0])
def test_statistics_merged_from_parts_are_those_of_the_whole_map(mean: float) -> None:
    torch.manual_seed(0)
    y = (torch.randn(3, 5, 8, 7) + mean * torch.arange(5).view(5, 1, 1)).to(memory_format=torch.channels_last)
    rows = y.permute(0, 2, 3, 1).reshape(-1, 5)
    pieces = rows.split([40, 1, 100, len(rows) - 141])
    parts = []
    for piece in pieces:
        shift = piece[:3].mean(0)
        deviation = piece - shift
        count = torch.full_like(shift, len(piece))
        parts.append(torch.stack([deviation.sum(0), deviation.square().sum(0), shift, count]))
    norm, exact = nn.BatchNorm2d(5), nn.BatchNorm2d(5).double()
    found = normalisation(y, norm, torch.stack(parts))
    exact(y.double())
    torch.testing.assert_close(found.mean.double(), y.double().mean((0, 2, 3)), rtol=1e-6, atol=1e-6)
    variance = y.double().var((0, 2, 3), unbiased=False)
    torch.testing.assert_close(found.inverse.double(), (variance + norm.eps).rsqrt(), rtol=1e-4, atol=0)
    torch.testing.assert_close(norm.running_mean.double(), exact.running_mean, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(norm.running_var.double(), exact.running_var, rtol=1e-4, atol=0)
    assert norm.num_batches_tracked == 1


def test_a_part_with_a_nan_makes_the_variance_nan() -> None:
    y = torch.zeros(1, 2, 4, 4).to(memory_format=torch.channels_last)
    parts = torch.ones(3, 4, 2)
    parts[1, 0, 1] = float("nan")
    found = normalisation(y, nn.BatchNorm2d(2), parts)
    assert found.inverse.isnan().tolist() == [False, True]


COMPILE = """
from triton.backends.compiler import GPUTarget
from triton.compiler import compile
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from halfstep.kernels import row_convolution_gluon as kernels

def tiles(*shape):
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=len(shape))
    return f"tensordesc<{dtype}[{','.join(map(str, shape))}],{layout!r}>"

for dtype in ("bf16", "fp16"):
    a_map = tiles(1, 1, kernels.PIXELS, kernels.CHANNELS)
    arguments = {"image": a_map, "weights": tiles(kernels.CHANNELS, 1, kernels.CHANNELS), "out": a_map}
    sums = {"parts": "*fp32"} | dict.fromkeys(kernels.VARYING, "i32")
    norm = {"raw": a_map} | dict.fromkeys(("mean", "scale", "offset"), "*fp32")
    for kernel, more in ((kernels.row_forward_kernel, {}), (kernels.row_gradient_kernel, norm)):
        signature = arguments | more | sums | dict.fromkeys(kernels.CONSTANTS, "constexpr")
        source = GluonASTSource(fn=kernel, signature=signature, constexprs=kernels.CONSTANTS)
        found = compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": kernels.WARPS})
        print(dtype, kernel.__name__, found.metadata.shared, found.asm["ptx"].count("wgmma.mma_async"))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="Triton is for Linux")
def test_the_kernel_compiles_for_hopper_without_one() -> None:
    # In a process of its own: Triton's interpreter, in which kernels are tested here, is switched on for this one.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", COMPILE], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line.split() for line in done.stdout.splitlines()]
    kernels = ("row_forward_kernel", "row_gradient_kernel")
    assert [(dtype, name) for dtype, name, _, _ in lines] == list(itertools.product(("bf16", "fp16"), kernels))
    for _, _, shared, products in lines:
        assert int(shared) <= 227 * 1024  # of a Hopper multiprocessor
        assert int(products) == 9 * 4  # nine taps, 64 channels in steps of 16
