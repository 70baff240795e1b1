"""Measure speed and error of each format on a device of this machine, within a few seconds.

An operation that takes more than 0.1 s is run once or twice, so that a slow format (bf16 on a CPU without it is 100
times slower than fp32) fits the budget; what no time is left for is not measured, and a note reports it.

Inputs are drawn once in fp32 and cast outside the timed call: a model keeps its activations in the low format too.
The error is that of the whole path, cast included. Only a slice of the answer is checked against fp64, on the CPU,
because consumer GPUs run fp64 at 1/64 of their fp32 rate and Metal has none.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

from halfstep.backend_flags import set_fp32_mode
from halfstep.errors import HardwareError, summarise_error
from halfstep.formats import FP8_E4M3, find_format
from halfstep.hardware.describe import OP_NAMES
from halfstep.hardware.device_facts import Hardware, Measurement, Op
from halfstep.hardware.driver import Driver

# tf32 has no dtype of its own: it is fp32 storage, and set_fp32_mode selects the matrix units.
DTYPES = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8_e4m3": torch.float8_e4m3fn,
}
CHECKED_ROWS = 32  # of a product, compared with fp64: all rows would take a CPU seconds

Kernel = Callable[[], torch.Tensor]


class TimedMatmul:
    """A square product, `size` on each side."""

    def __init__(self, size: int, place: torch.device) -> None:
        self.flops = 2.0 * size**3  # a multiply-add counts as two
        self.a, self.b = _draw((size, size), place), _draw((size, size), place, seed=1)
        self.answer = self.a[:CHECKED_ROWS].cpu().double() @ self.b.cpu().double()

    def make_kernel(self, format_name: str) -> Kernel:
        if format_name == "fp8_e4m3":
            a, scale_a = _scale_to_fp8(self.a)
            b, scale_b = _scale_to_fp8(self.b.t().contiguous())  # the kernel wants its second factor by columns
            return lambda: torch._scaled_mm(a, b.t(), scale_a, scale_b, out_dtype=torch.bfloat16)
        a, b = self.a.to(DTYPES[format_name]), self.b.to(DTYPES[format_name])
        return lambda: a @ b


class TimedConvolution:
    """A 3x3 convolution that keeps `channels`, over `batch` images of `side` pixels."""

    def __init__(self, batch: int, channels: int, side: int, place: torch.device, *, channels_last: bool) -> None:
        self.flops = 2.0 * batch * channels * channels * 9 * side * side  # 9 taps; padding keeps the side
        layout = torch.channels_last if channels_last else torch.contiguous_format
        self.images = _draw((batch, channels, side, side), place).to(memory_format=layout)
        self.weights = _draw((channels, channels, 3, 3), place, seed=1).to(memory_format=layout)
        self.answer = torch.conv2d(self.images[:1].cpu().double(), self.weights.cpu().double(), padding=1)

    def make_kernel(self, format_name: str) -> Kernel:
        images, weights = self.images.to(DTYPES[format_name]), self.weights.to(DTYPES[format_name])
        return lambda: torch.conv2d(images, weights, padding=1)


def _draw(shape: tuple[int, ...], place: torch.device, *, seed: int = 0) -> torch.Tensor:
    # A separate generator: measuring must not advance the user's random numbers.
    return torch.randn(shape, device=place, generator=torch.Generator(place).manual_seed(seed))


def _scale_to_fp8(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    # One scale per tensor, as in training: the largest magnitude becomes the largest number of the format.
    scale = values.abs().amax() / FP8_E4M3.largest
    return (values / scale).to(torch.float8_e4m3fn), scale


OPS: tuple[Op, ...] = ("matmul", "conv_nchw", "conv_nhwc")


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """Problem sizes and time budget for one kind of device."""

    matmul: int
    image: tuple[int, int, int]
    """Batch, channels and side of the convolution."""
    copy_bytes: int
    budget_s: float


CPU_SIZES = Sizes(matmul=512, image=(2, 64, 48), copy_bytes=64 * 2**20, budget_s=10.0)
GPU_SIZES = Sizes(matmul=4096, image=(32, 128, 64), copy_bytes=256 * 2**20, budget_s=5.0)
"""Large enough to fill an H200; a T4 needs 17 ms for its fp32 matmul."""

WARM_UP_S = 0.3


def measure(hardware: Hardware, *, sizes: Sizes | None = None, driver: Driver | None = None) -> Hardware:
    """Return the device with measurements, memory bandwidth, and notes on what was left out."""
    driver = driver or Driver()
    if not hardware.device:
        raise HardwareError(f"{hardware.name} is not on this machine", fix="measure a device that `probe` returned")
    if others := driver.describe_other_use(hardware.device):
        note = f"in use by others ({others}): not measured"
        return dataclasses.replace(hardware, notes=(*hardware.notes, note))
    sizes = sizes or (CPU_SIZES if hardware.kind == "cpu" else GPU_SIZES)
    return _MeasuringSession(hardware=hardware, driver=driver, sizes=sizes).measure_all()


@dataclass(kw_only=True)
class _MeasuringSession:
    """One round of measurements within a time budget; collects results and notes."""

    hardware: Hardware
    driver: Driver
    sizes: Sizes
    notes: list[str] = field(default_factory=list)
    inexact: dict[str, list[str]] = field(default_factory=dict)
    """By format: operations with a larger error than rounding the inputs explains."""
    began: float = field(init=False)

    def __post_init__(self) -> None:
        self.began = self.driver.read_clock()

    @property
    def left_s(self) -> float:
        return self.sizes.budget_s - (self.driver.read_clock() - self.began)

    def measure_all(self) -> Hardware:
        place = self.driver.get_device(self.hardware.device)
        with torch.no_grad():
            if self.hardware.kind != "cpu":
                self._raise_clocks(place)
            bandwidth = self._measure_bandwidth_gb_s(place)
            measurements = tuple(m for op in OPS for m in self._measure_op(op, place))
        load = self.driver.read_load()
        if self.hardware.kind == "cpu" and load > (os.cpu_count() or 1):
            self.notes.append(f"the CPU had other work (load {load:.1f}), so rates are rough: --fresh measures again")
        self.notes += [
            f"{name} sums in {name} here, not in fp32: {', '.join(ops)}" for name, ops in self.inexact.items()
        ]
        return dataclasses.replace(
            self.hardware,
            source="measured",
            measurements=measurements,
            bandwidth_gb_s=bandwidth,
            notes=(*self.hardware.notes, *self.notes),
        )

    def _measure_bandwidth_gb_s(self, place: torch.device) -> float | None:
        try:
            source = torch.zeros(self.sizes.copy_bytes // 4, device=place)
            target = torch.ones_like(source)
            seconds = self._time_kernel(lambda: target.copy_(source), "copy")
        except RuntimeError as error:
            self.notes.append(f"memory bandwidth not measured: {summarise_error(error)[:160]}")
            return None
        return 2 * self.sizes.copy_bytes / seconds / 1e9  # each byte is read once and written once

    def _measure_op(self, op: Op, place: torch.device) -> Iterator[Measurement]:
        problem: TimedMatmul | TimedConvolution
        if op == "matmul":
            problem = TimedMatmul(self.sizes.matmul, place)
        else:
            problem = TimedConvolution(*self.sizes.image, place, channels_last=op == "conv_nhwc")
        fp32_s: float | None = None
        for format_name in self._list_formats(op):
            if self.left_s <= 0:
                spent = f"the {self.sizes.budget_s:.0f} s for measurements were used up"
                self.notes.append(f"{OP_NAMES[op]} in {format_name} not measured: {spent}")
                continue
            if format_name != "fp32" and fp32_s is None:
                return  # nothing to compare with; the note on fp32 gives the reason
            try:
                seconds, error = self._measure_format(op, format_name, problem)
            except (RuntimeError, ValueError) as cause:  # no kernel for it, or no memory: a fact, not a failure
                self.notes.append(f"{OP_NAMES[op]} in {format_name} does not run here: {summarise_error(cause)[:160]}")
                continue
            fp32_s = seconds if fp32_s is None else fp32_s
            yield Measurement(
                op=op, format=format_name, tflops=problem.flops / seconds / 1e12, error=error, speedup=fp32_s / seconds
            )

    def _measure_format(self, op: Op, format_name: str, problem: TimedMatmul | TimedConvolution) -> tuple[float, float]:
        """Return seconds and relative error."""
        with set_fp32_mode("tf32" if format_name == "tf32" else "ieee"):
            kernel = problem.make_kernel(format_name)
            seconds = self._time_kernel(kernel, f"{op} {format_name}")
            answer = problem.answer  # of the first rows or images
            error = float((kernel()[: len(answer)].cpu().double() - answer).norm() / answer.norm())
        # Rounded inputs with fp32 sums err by less than one spacing; a larger error means that sums are rounded too.
        if format_name != "fp32" and error > find_format(format_name).spacing_at_1:
            self.inexact.setdefault(format_name, []).append(f"{OP_NAMES[op]} errs by {error:.0e}")
        return seconds, error

    def _list_formats(self, op: Op) -> tuple[str, ...]:
        # torch has no fp8 convolution.
        here = [name for name in ("fp32", "bf16", "fp16") if self.hardware.get_support(name) != "missing"]
        if self.hardware.get_support("tf32") == "native":
            here.insert(1, "tf32")
        if op == "matmul" and self.hardware.kind == "cuda" and self.hardware.get_support("fp8_e4m3") == "native":
            here.append("fp8_e4m3")
        return tuple(here)

    def _time_kernel(self, kernel: Kernel, work: str) -> float:
        return self.driver.time_run(kernel, self.hardware.device, work=work)

    def _raise_clocks(self, place: torch.device) -> None:
        """Warm the device up: an idle accelerator runs at low clocks, and the first measurement would be slow."""
        kernel = TimedMatmul(self.sizes.matmul, place).make_kernel("fp32")
        until = self.driver.read_clock() + WARM_UP_S
        while self.driver.read_clock() < until:
            self._time_kernel(kernel, "warm-up")
