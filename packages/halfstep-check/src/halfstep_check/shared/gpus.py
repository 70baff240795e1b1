"""Known GPUs by name, and which formats their architecture has units for.

Copied from halfstep, which this package does not need; halfstep's tests compare the two."""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from types import MappingProxyType
from typing import Literal

from halfstep_check.shared.errors import HardwareError

Support = Literal["native", "emulated", "missing"]
"""native: units of its own. emulated: runs, through another format's units. missing: not to be had."""
Kind = Literal["cuda", "rocm", "xpu", "mps", "cpu", "tpu"]
Formats = MappingProxyType[str, Support]


def _make_formats(*, native: str, emulated: str = "") -> Formats:
    """Return the support of each format, as in `_make_formats(native="fp32 fp16", emulated="bf16")`; others are
    missing."""
    table: dict[str, Support] = dict.fromkeys(native.split(), "native")
    table.update(dict.fromkeys(emulated.split(), "emulated"))
    return MappingProxyType(table)


def list_nvidia_formats(capability: tuple[int, int]) -> Formats:
    """Return formats by compute capability, from the arithmetic throughput table of the CUDA programming guide."""
    if capability >= (8, 9):  # Ada, Hopper, Blackwell
        return _make_formats(native="fp64 fp32 tf32 bf16 fp16 fp8_e4m3 fp8_e5m2")
    if capability >= (8, 0):  # Ampere
        return _make_formats(native="fp64 fp32 tf32 bf16 fp16")
    if capability >= (7, 0) or capability in ((5, 3), (6, 0), (6, 2)):  # Volta, Turing; TX1, P100, TX2
        return _make_formats(native="fp64 fp32 fp16", emulated="bf16")
    # sm_61 has fp16 units at 1/64 of the fp32 rate; libraries convert and compute in fp32 instead. Maxwell has none.
    return _make_formats(native="fp64 fp32", emulated="bf16 fp16")


def list_amd_formats(gfx: str) -> Formats:
    """Return formats by LLVM target name (`gfx90a:sramecc+` and the like), from AMD's ISA guides."""
    target = gfx.split(":")[0]
    if target.startswith(("gfx950", "gfx12")):  # MI350, RDNA4: OCP fp8
        return _make_formats(native="fp64 fp32 bf16 fp16 fp8_e4m3 fp8_e5m2")
    if target.startswith(("gfx908", "gfx90a", "gfx94", "gfx11")):  # MI100 to MI300, RDNA3 (WMMA)
        # MI300's fp8 is the "fnuz" variant, another format than the e4m3fn and e5m2 of NVIDIA and OCP.
        return _make_formats(native="fp64 fp32 bf16 fp16")
    return _make_formats(native="fp64 fp32 fp16", emulated="bf16")  # Vega, RDNA1, RDNA2: packed fp16 only


def list_apple_formats(name: str) -> Formats:
    """Return formats of Metal, which has no fp64; M1 and M2 GPUs compute bf16 as fp32 (seen in
    huggingface/transformers#40458)."""
    if any(chip in name.lower().split() for chip in ("m1", "m2")):
        return _make_formats(native="fp32 fp16", emulated="bf16")
    return _make_formats(native="fp32 bf16 fp16")


TPU: Formats = MappingProxyType({"fp32": "native", "bf16": "native"})


def list_formats(kind: Kind, capability: tuple[int, int] | None, chip: str, *, has_fp64: bool) -> Formats:
    """Return the formats of an accelerator; `chip` is AMD's LLVM target or the name of Apple's chip."""
    if capability is not None:
        return list_nvidia_formats(capability)
    if kind == "xpu":
        # Xe-HPG, Xe2 and Xe-HPC have matrix engines (XMX) for both half formats; only Xe-HPG lacks fp64 in hardware.
        return _make_formats(native="fp64 fp32 bf16 fp16" if has_fp64 else "fp32 bf16 fp16")
    return list_amd_formats(chip) if kind == "rocm" else list_apple_formats(chip) if kind == "mps" else TPU


KINDS: dict[str, Kind] = {"NVIDIA": "cuda", "AMD": "rocm", "Intel": "xpu", "Apple": "mps", "Google": "tpu"}


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownGPU:
    """One accelerator; halfstep's own row also holds its memory and rates."""

    name: str
    vendor: str
    support: Formats

    def has(self, format_name: str) -> str:
        """How it has a format: native, emulated or missing."""
        return self.support.get(format_name, "missing")


def read_known() -> Iterator[KnownGPU]:
    """Return every model of the file, in its order."""
    family: list[str] = []
    for line in resources.files(__package__).joinpath("known_gpus.txt").read_text().splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if line.startswith("    "):
            yield _parse_model(family, *cells)
        elif not line.startswith("#"):
            family = cells


def _parse_model(family: list[str], name: str, *more: str) -> KnownGPU:
    vendor, architecture, chip = family[:3]
    major, _, minor = chip.partition(".")
    capability = (int(major), int(minor)) if vendor == "NVIDIA" else None
    support = list_formats(KINDS[vendor], capability, chip or architecture, has_fp64=chip == "fp64")
    return KnownGPU(name=name, vendor=vendor, support=support)


KNOWN: tuple[KnownGPU, ...] = tuple(read_known())
VENDOR_WORDS = ("nvidia", "geforce", "tesla", "amd", "radeon", "instinct", "intel", "apple", "google")
NOISE = frozenset((*VENDOR_WORDS, "r", "tm", "gpu", "graphics", "generation", "edition", "workstation"))
"""Words that vendors and drivers put around a model name, on either side of the comparison."""
FORM_FACTOR = re.compile(r"sxm\d?|pcie|nvl|dgxs|hbm\d?e?|3e|oam|\d+gb?")
"""Words that may follow the model without making it another one."""


@functools.cache  # every name is compared with every row
def split_words(name: str) -> frozenset[str]:
    """Split `NVIDIA A100-SXM4-80GB` into a100, sxm4, 80gb; `rtx4090`, `M2Max` and `v100 32 GB` are split and joined
    alike."""
    text = re.sub(r"(\d+)\s*gi?b\b", r" \1gb ", name.lower())
    text = re.sub(r"\b(\d+)g\b", r" \1gb ", text)  # `80g`, but no A10G
    text = re.sub(r"\b(rtx|gtx|rx|arc|tpu|titan|quadro|max)(?=[a-z]?\d)", r"\1 ", text)
    text = re.sub(r"(?<=\d)(ti|super|xtx|xt|pro|max|ultra|ada|pcie|nvl)", r" \1 ", text)
    text = re.sub(r"(?<=\bti)(?=super)", " ", text)
    return frozenset(re.findall(r"[a-z0-9]+", text)) - NOISE


def find_known(name: str) -> KnownGPU | None:
    """Return the device a driver (`Tesla T4`) or a person (`4090`) means by this name; None if no single one fits."""
    rows = _find_rows(split_words(name))
    return rows[0] if len(rows) == 1 else None


def _find_rows(asked: frozenset[str]) -> list[KnownGPU]:
    # A longer name than ours, by words that do not make it another model: the row that says most of it.
    within = [
        gpu for gpu in KNOWN if split_words(gpu.name) <= asked and _is_only_form_factor(asked - split_words(gpu.name))
    ]
    if within:
        return [max(within, key=lambda gpu: len(split_words(gpu.name)))]
    # A shorter one: the rows that add least to it. `3080 12gb` is a row of its own.
    model = frozenset(word for word in asked if not FORM_FACTOR.fullmatch(word))
    around = _find_rows_around(asked) or _find_rows_around(model) if model else []
    least = min((len(split_words(gpu.name)) for gpu in around), default=0)
    return [gpu for gpu in around if len(split_words(gpu.name)) == least]


def _find_rows_around(wanted: frozenset[str]) -> list[KnownGPU]:
    return [gpu for gpu in KNOWN if wanted <= split_words(gpu.name)]


def _is_only_form_factor(extra: frozenset[str]) -> bool:
    return all(FORM_FACTOR.fullmatch(word) for word in extra)


def look_up_gpu(name: str) -> KnownGPU:
    """The row of a known accelerator: `look_up_gpu("v100")`, `look_up_gpu("NVIDIA A100-SXM4-80GB")`."""
    if (gpu := find_known(name)) is not None:
        return gpu
    if rows := _find_rows(split_words(name)):
        raise HardwareError(
            f"{name!r} matches {len(rows)} GPUs", fix=f"use one of {', '.join(gpu.name for gpu in rows[:6])}"
        )
    raise HardwareError(f"unknown GPU {name!r}", fix=f"nearest known names: {', '.join(find_nearest_names(name))}")


def find_nearest_names(name: str, *, count: int = 5) -> list[str]:
    """Return the known names most like this one: those that share a word with it first, then by spelling."""

    def likeness(gpu: KnownGPU) -> tuple[int, float]:
        spelling = difflib.SequenceMatcher(None, name.lower(), gpu.name.lower()).ratio()
        return len(split_words(name) & split_words(gpu.name)), spelling

    return [gpu.name for gpu in sorted(KNOWN, key=likeness, reverse=True)[:count]]
