"""The operations that are timed: one problem each, in any format, with its fp64 answer.

Inputs are drawn once in fp32 and cast outside the timed call: a model keeps its activations in the low format too.
The error is that of the whole path, cast included. Only a slice of the answer is checked against fp64, on the CPU,
because consumer GPUs run fp64 at 1/64 of their fp32 rate and Metal has none.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Literal, Protocol

import torch

from halfstep.formats import FP8_E4M3
from halfstep.hardware.facts import Op

DTYPES = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8_e4m3": torch.float8_e4m3fn,
}
CHECKED_ROWS = 32

Kernel = Callable[[], torch.Tensor]


class Problem(Protocol):
    """One operation of one size on one device."""

    flops: float

    def kernel(self, format_name: str) -> Kernel: ...
    def error(self, result: torch.Tensor) -> float: ...


class Matmul:
    """A square product, `size` on each side."""

    def __init__(self, size: int, place: torch.device) -> None:
        self.flops = 2.0 * size**3
        self.a, self.b = _draw((size, size), place), _draw((size, size), place, seed=1)
        self.answer = self.a[:CHECKED_ROWS].cpu().double() @ self.b.cpu().double()

    def kernel(self, format_name: str) -> Kernel:
        if format_name == "fp8_e4m3":
            return self._fp8_kernel()
        a, b = self.a.to(DTYPES[format_name]), self.b.to(DTYPES[format_name])
        return lambda: a @ b

    def _fp8_kernel(self) -> Kernel:
        a, scale_a = _scaled_to_fp8(self.a)
        b, scale_b = _scaled_to_fp8(self.b.t().contiguous())  # the kernel wants its second factor by columns
        return lambda: torch._scaled_mm(a, b.t(), scale_a, scale_b, out_dtype=torch.bfloat16)

    def error(self, result: torch.Tensor) -> float:
        return _distance(result[:CHECKED_ROWS], self.answer)


class Convolution:
    """A 3x3 convolution that keeps `channels`, over `batch` images of `side` pixels."""

    def __init__(self, batch: int, channels: int, side: int, place: torch.device, *, channels_last: bool) -> None:
        self.flops = 2.0 * batch * channels * channels * 9 * side * side
        layout = torch.channels_last if channels_last else torch.contiguous_format
        self.images = _draw((batch, channels, side, side), place).to(memory_format=layout)
        self.weights = _draw((channels, channels, 3, 3), place, seed=1).to(memory_format=layout)
        self.answer = torch.conv2d(self.images[:1].cpu().double(), self.weights.cpu().double(), padding=1)

    def kernel(self, format_name: str) -> Kernel:
        images, weights = self.images.to(DTYPES[format_name]), self.weights.to(DTYPES[format_name])
        return lambda: torch.conv2d(images, weights, padding=1)

    def error(self, result: torch.Tensor) -> float:
        return _distance(result[:1], self.answer)


def problem(op: Op, matmul_size: int, image: tuple[int, int, int], place: torch.device) -> Problem:
    """`image` is batch, channels and side of the convolution."""
    if op == "matmul":
        return Matmul(matmul_size, place)
    return Convolution(*image, place, channels_last=op == "conv_nhwc")


def copy_kernel(num_bytes: int, place: torch.device) -> Kernel:
    """Reads and writes `num_bytes` each: what memory gives when nothing is computed."""
    source = torch.zeros(num_bytes // 4, device=place)
    target = torch.ones_like(source)
    return lambda: target.copy_(source)


def _draw(shape: tuple[int, ...], place: torch.device, *, seed: int = 0) -> torch.Tensor:
    # A generator of our own: measuring must not move the user's random numbers.
    return torch.randn(shape, device=place, generator=torch.Generator(place).manual_seed(seed))


def _scaled_to_fp8(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scale = values.abs().amax() / FP8_E4M3.largest
    return (values / scale).to(torch.float8_e4m3fn), scale


def _distance(result: torch.Tensor, answer: torch.Tensor) -> float:
    return float((result.cpu().double() - answer).norm() / answer.norm())


@contextlib.contextmanager
def fp32_computes_in(mode: Literal["ieee", "tf32"]) -> Iterator[None]:
    """Strict fp32 or TF32 for matmul and convolution; every flag is put back."""
    backends: Any = torch.backends
    parents = (backends, backends.cudnn, backends.mkldnn)
    leaves = (backends.cuda.matmul, backends.cudnn.conv, backends.mkldnn.matmul, backends.mkldnn.conv)
    before = []
    try:
        for node in (*parents, *leaves):  # a node shows its own value only once those above it say "none"
            before.append((node, node.fp32_precision))
            node.fp32_precision = "none"
        for leaf in leaves:
            leaf.fp32_precision = mode
        yield
    finally:
        for node, value in reversed(before):
            node.fp32_precision = value
