"""`Hardware`: the facts of one device. No policy and no torch: `decide` draws the conclusions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

Support = Literal["native", "emulated", "missing"]
"""native: units of its own. emulated: runs, through another format's units. missing: not to be had."""

Op = Literal["matmul", "conv_nchw", "conv_nhwc"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """One operation in one format, timed and compared with fp64."""

    op: Op
    format: str
    tflops: float
    error: float
    """Relative Frobenius distance to the fp64 result."""
    speedup: float
    """Against strict fp32, same operation and same size."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Hardware:
    """Facts of one device, looked up (`source="table"`), seen (`"probe"`) or measured (`"measured"`)."""

    kind: Literal["cuda", "rocm", "xpu", "mps", "cpu", "tpu"]
    device: str
    """How torch names it: `cuda:0`, `mps`, `cpu`; empty for hardware that is not here."""
    name: str
    vendor: str
    capability: tuple[int, int] | None = None
    """NVIDIA compute capability."""
    architecture: str = ""
    memory_total_bytes: int = 0
    memory_free_bytes: int | None = None
    support: Mapping[str, Support] = field(default_factory=lambda: MappingProxyType({}))
    """Format name to how the device has it; a format that is not listed is missing."""
    tensor_cores: bool = False
    driver: str = ""
    torch_version: str = ""
    source: Literal["table", "probe", "measured"] = "probe"
    measurements: tuple[Measurement, ...] = ()
    bandwidth_gb_s: float | None = None
    published_tflops: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    """Vendor's dense rates per format, from the table of known devices; leads, not measurements."""
    published_source: str = ""
    notes: tuple[str, ...] = ()
    """What a reader should know: busy GPU, skipped measurements, shared memory, TPU not run here."""

    def has(self, format_name: str) -> Support:
        return self.support.get(format_name, "missing")

    def speedup(self, format_name: str) -> float | None:
        """How much faster than strict fp32: the best measured operation, else published rates, else unknown."""
        if format_name == "fp32":
            return 1.0
        measured = [m.speedup for m in self.measurements if m.format == format_name]
        if measured:
            return max(measured)
        if format_name in self.published_tflops and self.published_tflops.get("fp32"):
            return self.published_tflops[format_name] / self.published_tflops["fp32"]
        return None
