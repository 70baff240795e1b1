"""Which formats an architecture has units for, vendor by vendor. Pure facts, no torch.

`torch.cuda.is_bf16_supported()` is not a guide: since torch 2.4 it counts emulation and returns True on a T4.
tf32 is listed for NVIDIA alone: it is the only vendor whose switch torch gives by default.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from types import MappingProxyType

from halfstep.hardware.device_facts import Kind, Support

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


SMALL_TURING = re.compile(r"\b(gtx 16\d\d|mx[45]50|t(400|500|550|600|1000|1200|2000))\b")
"""Models with those chips, among them Quadro T1000 and T2000."""


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


BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16", "FEAT_BF16"})
"""x86 vector and tile units, ARM's BFDOT and BFMMLA, and macOS' name for the latter."""

# ARM's `asimdhp` alone is fp16 arithmetic that also sums in fp16; training needs the fp32 sums of `asimdfhm`.
FP16_FLAGS = frozenset({"avx512_fp16", "amx_fp16", "asimdfhm", "FEAT_FHM"})


def list_cpu_formats(flags: Collection[str]) -> Formats:
    """Return formats by the flags of the CPU: /proc/cpuinfo names, or macOS' `FEAT_*`."""
    bf16: Support = "emulated" if BF16_FLAGS.isdisjoint(flags) else "native"
    fp16: Support = "emulated" if FP16_FLAGS.isdisjoint(flags) else "native"
    return MappingProxyType({"fp64": "native", "fp32": "native", "bf16": bf16, "fp16": fp16})


TPU: Formats = MappingProxyType({"fp32": "native", "bf16": "native"})


def list_formats(kind: Kind, capability: tuple[int, int] | None, chip: str, *, has_fp64: bool) -> Formats:
    """Return the formats of an accelerator; `chip` is AMD's LLVM target or the name of Apple's chip."""
    if capability is not None:
        return list_nvidia_formats(capability)
    if kind == "xpu":
        # Xe-HPG, Xe2 and Xe-HPC have matrix engines (XMX) for both half formats; only Xe-HPG lacks fp64 in hardware.
        return _make_formats(native="fp64 fp32 bf16 fp16" if has_fp64 else "fp32 bf16 fp16")
    return list_amd_formats(chip) if kind == "rocm" else list_apple_formats(chip) if kind == "mps" else TPU


def has_matrix_units(kind: Kind, capability: tuple[int, int] | None, name: str, support: Formats) -> bool:
    if capability is not None:
        # From Volta on, except for Turing's small chips (TU116, TU117).
        return capability >= (7, 0) and not (capability == (7, 5) and SMALL_TURING.search(name.lower()))
    return kind != "mps" and support.get("bf16") == "native"
