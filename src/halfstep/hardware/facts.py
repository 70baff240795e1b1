"""`Hardware`: the facts of one device. No policy and no torch: `decide` draws the conclusions."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

Support = Literal["native", "emulated", "missing"]
"""native: units of its own. emulated: runs, through another format's units. missing: not to be had."""

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
    """Against strict fp32, same operation and same size."""
    small: bool = False
    """Timed on the small problem only, because the full one takes too long: its rate compares with no full one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Hardware:
    """Facts of one device, looked up (`source="table"`), seen (`"probe"`) or measured (`"measured"`)."""

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
    """Format name to how the device has it; a format that is not listed is missing."""
    tensor_cores: bool = False
    uuid: str = ""
    driver: str = ""
    torch_version: str = ""
    source: Literal["table", "probe", "measured"] = "probe"
    measurements: tuple[Measurement, ...] = ()
    bandwidth_gb_s: float | None = None
    published_tflops: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    """Vendor's dense rates per format, from the table of known devices; leads, not measurements."""
    published_source: str = ""
    published_check: str = ""
    """How those rates were compared with what their source says."""
    notes: tuple[str, ...] = ()
    """What a reader should know: busy GPU, skipped measurements, shared memory, TPU not run here."""

    def has(self, format_name: str) -> Support:
        return self.support.get(format_name, "missing")

    def measured(self, op: Op, format_name: str) -> Measurement | None:
        """The measurement of this operation in this format, where one was made."""
        return next((m for m in self.measurements if (m.op, m.format) == (op, format_name)), None)

    def layout_gain(self, format_name: str) -> float | None:
        """How much faster convolutions in this format are in channels_last; None unless both were timed at one size."""
        nchw, nhwc = self.measured("conv_nchw", format_name), self.measured("conv_nhwc", format_name)
        return nhwc.tflops / nchw.tflops if nchw and nhwc and nchw.small == nhwc.small else None

    def best(self, format_name: str) -> Measurement | None:
        """The operation that gains most from this format, where any was measured."""
        of_format = [m for m in self.measurements if m.format == format_name]
        return max(of_format, key=lambda m: m.speedup, default=None)

    def speedup(self, format_name: str) -> float | None:
        """How much faster than strict fp32: measured, else by published rates, else unknown.

        Measured means the geometric mean of matmul and convolution, the latter in its better layout: a format that
        gains on one and is hopeless on the other (fp16 on many CPUs, bf16 convolutions on a T4) is not a gain.
        """
        if format_name == "fp32":
            return 1.0
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
        """Plain JSON types; `from_dict` is the way back."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return values | {
            "capability": list(self.capability) if self.capability else None,
            "support": dict(self.support),
            "published_tflops": dict(self.published_tflops),
            "measurements": [dataclasses.asdict(m) for m in self.measurements],
            "notes": list(self.notes),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Hardware:
        """Raises LookupError, TypeError or ValueError on anything `to_dict` did not write."""
        capability = values["capability"]
        return cls(
            **{
                **values,
                "capability": (int(capability[0]), int(capability[1])) if capability else None,
                "support": MappingProxyType(dict(values["support"])),
                "published_tflops": MappingProxyType(dict(values["published_tflops"])),
                "measurements": tuple(Measurement(**m) for m in values["measurements"]),
                "notes": tuple(values["notes"]),
            }
        )
