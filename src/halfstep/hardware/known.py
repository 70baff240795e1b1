"""How a row of the table of known accelerators is made. The rows stand in nvidia.py and accelerators.py. No torch.

Rates are the vendor's peaks in TFLOPS without sparsity and with fp32 accumulation, which is what torch uses: GeForce
cards run that at half the rate of fp16 accumulation, and the larger number is the one on the box.
A rate that no public document supports is left out.

Where units and clock are given, the fp32 rate is units x 2 x boost clock (a fused multiply-add counts twice), and the
other formats follow by the ratio of their matrix units, which public tables confirm for cards of each family.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from halfstep.hardware.facts import Kind
from halfstep.hardware.support import Formats, has_tensor_cores, nvidia_formats

Rates = Mapping[str, float]

Checked = Literal["datasheet", "secondary", "derived", "recalled"]
"""How a row was compared.

datasheet: with the vendor's own table. secondary: with public tables that quote the vendor.
derived: the arithmetic above, from units and clocks of public tables. recalled: with nothing.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownGPU:
    """One accelerator as its vendor describes it."""

    name: str
    kind: Kind
    vendor: str
    architecture: str
    capability: tuple[int, int] | None
    memory_gb: tuple[int, ...]
    """Every size it is sold with; empty where that is the buyer's choice."""
    support: Formats
    tensor_cores: bool
    tflops: Rates
    source: str
    checked: Checked
    units: int = 0
    """Multiply-adds a clock in fp32; a unit that issues two counts twice."""
    boost_mhz: int = 0
    notes: tuple[str, ...] = ()

    @property
    def verification(self) -> str:
        """How the row was compared, for a reader."""
        if self.checked == "derived":
            return f"derived: {self.units} units x 2 x {self.boost_mhz} MHz, other formats by their ratio to fp32"
        return {
            "datasheet": "compared with the vendor's own table",
            "secondary": "compared with public tables that quote the vendor",
            "recalled": "recalled, not verified",
        }[self.checked]


MemorySizes = tuple[int, ...]
Models = Mapping[str, tuple[float | Rates, MemorySizes] | tuple[float, MemorySizes, tuple[int, int]]]
"""Name to its fp32 TFLOPS (or all rates), the memory sizes in GB, and units with boost clock where it follows."""


def half(rate: float) -> dict[str, float]:
    """One rate for both 16-bit formats."""
    return {"bf16": rate, "fp16": rate}


def _all_rates(fp32: float | Rates, ratios: Rates) -> Rates:
    if isinstance(fp32, Mapping):
        return MappingProxyType(dict(fp32))
    return MappingProxyType({"fp32": fp32, **{name: round(fp32 * ratio, 3) for name, ratio in ratios.items()}})


def nvidia_family(
    architecture: str,
    capability: tuple[int, int],
    models: Models,
    *,
    source: str,
    checked: Checked = "derived",
    ratios: Rates | None = None,
    notes: tuple[str, ...] = (),
) -> tuple[KnownGPU, ...]:
    """Rows of one NVIDIA architecture; `ratios` to the fp32 rate fill in the rates a model does not list."""
    # pytorch/pytorch#172352: from torch 2.11 on, only its CUDA 12.6 build has kernels below sm_75.
    if capability < (7, 5):
        notes = (*notes, "torch 2.11 and newer run on it in their CUDA 12.6 build only")
    return family(
        "NVIDIA",
        architecture,
        models,
        kind="cuda",
        capability=capability,
        support=nvidia_formats(capability),
        tensor_cores=all(has_tensor_cores(capability, name) for name in models),
        ratios=ratios,
        source=source,
        checked=checked,
        notes=notes,
    )


def family(
    vendor: str,
    architecture: str,
    models: Models,
    *,
    kind: Kind,
    support: Formats,
    source: str,
    checked: Checked = "derived",
    capability: tuple[int, int] | None = None,
    ratios: Rates | None = None,
    tensor_cores: bool = True,
    notes: tuple[str, ...] = (),
) -> tuple[KnownGPU, ...]:
    """Rows of one architecture."""
    rows = []
    for name, (fp32, memory_gb, *arithmetic) in models.items():
        units, boost_mhz = arithmetic[0] if arithmetic else (0, 0)
        rows.append(
            KnownGPU(
                name=name,
                kind=kind,
                vendor=vendor,
                architecture=architecture,
                capability=capability,
                memory_gb=memory_gb,
                support=support,
                tensor_cores=tensor_cores,
                tflops=_all_rates(fp32, ratios or {}),
                source=source,
                checked=checked,
                units=units,
                boost_mhz=boost_mhz,
                notes=notes,
            )
        )
    return tuple(rows)
