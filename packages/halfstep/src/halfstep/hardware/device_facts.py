"""`Hardware`: the facts of one device. No policy and no torch: `decide` uses them."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

Support = Literal["native", "emulated", "missing"]
"""native: has hardware units. emulated: runs through another format's units. missing: not available."""

Op = Literal["matmul", "conv_nchw", "conv_nhwc"]

Kind = Literal["cuda", "rocm", "xpu", "mps", "cpu", "tpu"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """One operation in one format, timed and compared with fp64."""

    op: Op
    format: str
    tflops: float
    error: float
    """Relative Frobenius distance to the fp64 result."""
    speedup: float
    """Relative to strict fp32, same operation and size."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Hardware:
    """Facts of one device, looked up (`source="table"`), probed (`"probe"`) or measured (`"measured"`)."""

    kind: Kind
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
    """How the device supports each format; a format that is not listed is missing."""
    tensor_cores: bool = False
    uuid: str = ""
    driver: str = ""
    torch_version: str = ""
    source: Literal["table", "probe", "measured"] = "probe"
    measurements: tuple[Measurement, ...] = ()
    bandwidth_gb_s: float | None = None
    published_tflops: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    """The vendor's dense rates per format, from the table of known devices; not measurements."""
    published_source: str = ""
    published_check: str = ""
    """How those rates were checked against their source."""
    notes: tuple[str, ...] = ()
    """Notes for the user: busy GPU, skipped measurements, shared memory, TPU not run here."""

    def get_support(self, format_name: str) -> Support:
        return self.support.get(format_name, "missing")

    def find_measurement(self, op: Op, format_name: str) -> Measurement | None:
        """Return the measurement of this operation in this format, if there is one."""
        return next((m for m in self.measurements if (m.op, m.format) == (op, format_name)), None)

    def find_speedup(self, format_name: str) -> float | None:
        """Return the speedup over strict fp32: measured, else from published rates, else None.

        The measured speedup is the geometric mean of matmul and convolution, the latter in its better layout: a format
        that gains on one and is very slow on the other (fp16 on many CPUs, bf16 convolutions on a T4) is no gain.
        """
        if format_name == "fp32":
            return 1.0
        # By kind of operation, with the better of the two layouts of a convolution.
        gains: dict[str, float] = {}
        for m in self.measurements:
            if m.format == format_name:
                kind = m.op.split("_")[0]
                gains[kind] = max(m.speedup, gains.get(kind, 0.0))
        if gains:
            return statistics.geometric_mean(gains.values())
        if format_name in self.published_tflops and self.published_tflops.get("fp32"):
            return self.published_tflops[format_name] / self.published_tflops["fp32"]
        return None

    def to_dict(self) -> dict[str, Any]:
        """Return what JSON can hold."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        tables = {"support": dict(self.support), "published_tflops": dict(self.published_tflops)}
        return {**values, **tables, "measurements": [dataclasses.asdict(m) for m in self.measurements]}
