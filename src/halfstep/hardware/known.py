"""How a row of the table of known accelerators is made. The rows stand in nvidia.py and accelerators.py. No torch.

Rates are the vendor's peaks in TFLOPS without sparsity and with fp32 accumulation, which is what torch uses: GeForce
cards run that at half the rate of fp16 accumulation, and the larger number is the one on the box. Where a vendor
prints only the fp32 rate of a model, the others follow from the ratio its architecture's whitepaper gives.
A rate that no public document supports is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from halfstep.hardware.facts import Kind
from halfstep.hardware.support import Formats, has_tensor_cores, nvidia_formats

Rates = Mapping[str, float]


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
    notes: tuple[str, ...] = ()


Models = Mapping[str, tuple[float | Rates, tuple[int, ...]]]
"""Name to its fp32 TFLOPS (or all rates), and the memory sizes in GB."""


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
    ratios: Rates | None = None,
    notes: tuple[str, ...] = (),
) -> tuple[KnownGPU, ...]:
    """Rows of one NVIDIA architecture; `ratios` to the fp32 rate fill in the rates a model does not list."""
    # pytorch/pytorch#172352: from torch 2.11 on, only its CUDA 12.6 build has kernels below sm_75.
    if capability < (7, 5):
        notes = (*notes, "torch 2.11 and newer run on it in their CUDA 12.6 build only")
    return tuple(
        KnownGPU(
            name=name,
            kind="cuda",
            vendor="NVIDIA",
            architecture=architecture,
            capability=capability,
            memory_gb=memory_gb,
            support=nvidia_formats(capability),
            tensor_cores=has_tensor_cores(capability, name),
            tflops=_all_rates(fp32, ratios or {}),
            source=source,
            notes=notes,
        )
        for name, (fp32, memory_gb) in models.items()
    )


def other_family(
    vendor: str,
    architecture: str,
    models: Models,
    *,
    kind: Kind,
    support: Formats,
    source: str,
    ratios: Rates | None = None,
    tensor_cores: bool = True,
    notes: tuple[str, ...] = (),
) -> tuple[KnownGPU, ...]:
    """Rows of one architecture of another vendor."""
    return tuple(
        KnownGPU(
            name=name,
            kind=kind,
            vendor=vendor,
            architecture=architecture,
            capability=None,
            memory_gb=memory_gb,
            support=support,
            tensor_cores=tensor_cores,
            tflops=_all_rates(fp32, ratios or {}),
            source=source,
            notes=notes,
        )
        for name, (fp32, memory_gb) in models.items()
    )
