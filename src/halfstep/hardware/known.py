"""Accelerators as their vendors describe them, from known_gpus.txt: the file says what its columns and rates mean."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from types import MappingProxyType
from typing import Literal, cast

from halfstep.hardware.facts import Kind
from halfstep.hardware.support import Formats, formats_of, has_matrix_units

Checked = Literal["datasheet", "secondary", "derived", "recalled"]
VERIFICATION = {
    "datasheet": "compared with the vendor's own table",
    "secondary": "compared with public tables that quote the vendor",
    "derived": "derived: {} units x 2 x {} MHz, other formats by their ratio to fp32",
    "recalled": "recalled, not verified",
}
KINDS: dict[str, Kind] = {"NVIDIA": "cuda", "AMD": "rocm", "Intel": "xpu", "Apple": "mps", "Google": "tpu"}
OLD_BUILD = "torch 2.11 and newer run on it in their CUDA 12.6 build only"
"""pytorch/pytorch#172352: no other build has kernels below sm_75."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownGPU:
    """One accelerator."""

    name: str
    kind: Kind
    vendor: str
    architecture: str
    capability: tuple[int, int] | None
    memory_gb: tuple[int, ...]
    """Every size it is sold with; empty where that is the buyer's choice."""
    support: Formats
    tensor_cores: bool
    tflops: Mapping[str, float]
    source: str
    checked: Checked
    units: int = 0
    """Multiply-adds a clock in fp32; a unit that issues two counts twice."""
    boost_mhz: int = 0
    notes: tuple[str, ...] = ()

    @property
    def verification(self) -> str:
        """How the row was compared, for a reader."""
        return VERIFICATION[self.checked].format(self.units, self.boost_mhz)


def read_known() -> Iterator[KnownGPU]:
    """Every model of the file, in its order."""
    family: list[str] = []
    for line in resources.files(__package__).joinpath("known_gpus.txt").read_text().splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if line.startswith("    "):
            yield _model(family, *cells)
        elif not line.startswith("#"):
            family = cells


def _model(family: list[str], name: str, memory: str, rates: str = "", cores: str = "") -> KnownGPU:
    vendor, architecture, chip, checked, ratios, source, *notes = family
    major, _, minor = chip.partition(".")
    capability = (int(major), int(minor)) if vendor == "NVIDIA" else None
    units, boost_mhz = (int(part) for part in (cores or "0 0").split())
    kind = KINDS[vendor]
    support = formats_of(kind, capability, chip or architecture, has_fp64=chip == "fp64")
    return KnownGPU(
        name=name,
        kind=kind,
        vendor=vendor,
        architecture=architecture,
        capability=capability,
        memory_gb=tuple(map(int, memory.split())),
        support=support,
        tensor_cores=has_matrix_units(kind, capability, name, support),
        tflops=MappingProxyType(_rates(rates, _numbers(ratios))),
        source=source,
        checked=cast(Checked, checked),
        units=units,
        boost_mhz=boost_mhz,
        notes=(*notes, *((OLD_BUILD,) if capability and capability < (7, 5) else ())),
    )


def _rates(text: str, ratios: Mapping[str, float]) -> dict[str, float]:
    """`fp32 10.6 fp16 21.2`, or the fp32 rate alone, from which the others follow."""
    if not text or not text[0].isdigit():
        return _numbers(text)
    return {"fp32": float(text), **{name: round(float(text) * ratio, 3) for name, ratio in ratios.items()}}


def _numbers(text: str) -> dict[str, float]:
    words = text.split()
    return {name: float(number) for name, number in zip(words[::2], words[1::2], strict=True)}
