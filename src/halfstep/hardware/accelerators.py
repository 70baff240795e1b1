"""AMD, Intel, Apple and Google: their part of the table of known accelerators."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from halfstep.hardware.known import KnownGPU, Models, half, other_family
from halfstep.hardware.support import amd_formats, apple_formats, intel_formats

TWO_DIES = ("one card is two devices for torch, each with half the memory and half the rate",)
FNUZ = ("its fp8 is the fnuz variant, not the e4m3fn and e5m2 that halfstep means by fp8",)

AMD = (
    *other_family(
        "AMD",
        "CDNA1",
        {"MI100": ({"fp64": 11.5, "fp32": 46.1, "bf16": 92.3, "fp16": 184.6}, (32,))},
        kind="rocm",
        support=amd_formats("gfx908"),
        source="AMD Instinct MI100 datasheet, matrix rates",
    ),
    *other_family(
        "AMD",
        "CDNA2",
        {"MI210": ({"fp64": 45.3, "fp32": 45.3, **half(181)}, (64,))},
        kind="rocm",
        support=amd_formats("gfx90a"),
        source="AMD Instinct MI210 datasheet, matrix rates",
    ),
    *other_family(
        "AMD",
        "CDNA2",
        {
            "MI250": ({"fp64": 90.5, "fp32": 90.5, **half(362.1)}, (128,)),
            "MI250X": ({"fp64": 95.7, "fp32": 95.7, **half(383)}, (128,)),
        },
        kind="rocm",
        support=amd_formats("gfx90a"),
        source="AMD Instinct MI200 series datasheet, matrix rates",
        notes=TWO_DIES,
    ),
    *other_family(
        "AMD",
        "CDNA3",
        {
            "MI300A": ({"fp64": 122.6, "fp32": 122.6, **half(980.6)}, (128,)),
            "MI300X": ({"fp64": 163.4, "fp32": 163.4, **half(1307.4)}, (192,)),
            "MI325X": ({"fp64": 163.4, "fp32": 163.4, **half(1307.4)}, (256,)),
        },
        kind="rocm",
        support=amd_formats("gfx942"),
        source="AMD Instinct MI300 series datasheets, matrix rates, dense",
        notes=FNUZ,
    ),
    *other_family(
        "AMD",
        "RDNA2",
        {
            "RX 6600 XT": (10.6, (8,)),
            "RX 6700 XT": (13.2, (12,)),
            "RX 6800": (16.2, (16,)),
            "RX 6800 XT": (20.7, (16,)),
            "RX 6900 XT": (23.0, (16,)),
        },
        kind="rocm",
        support=amd_formats("gfx1030"),
        ratios={"fp16": 2},
        tensor_cores=False,
        source="AMD product pages",
    ),
    *other_family(
        "AMD",
        "RDNA3",
        {
            "RX 7600": (21.7, (8,)),
            "RX 7700 XT": (35.2, (12,)),
            "RX 7800 XT": (37.3, (16,)),
            "RX 7900 XT": (51.5, (20,)),
            "RX 7900 XTX": (61.4, (24,)),
        },
        kind="rocm",
        support=amd_formats("gfx1100"),
        ratios=half(2),
        source="AMD product pages; RDNA3 ISA guide",
    ),
)

INTEL = (
    *other_family(
        "Intel",
        "Xe-HPG",
        {"Arc A380": (4.2, (6,)), "Arc A750": (14.7, (8,)), "Arc A770": (17.2, (16, 8))},
        kind="xpu",
        support=intel_formats(has_fp64=False),
        ratios=half(8),
        source="Intel Arc product pages: vector engines x 16 x clock; XMX ratio from the Xe-HPG whitepaper",
    ),
    *other_family(
        "Intel",
        "Xe2",
        {"Arc B570": ({}, (10,)), "Arc B580": ({}, (12,))},
        kind="xpu",
        support=intel_formats(has_fp64=True),
        source="Intel Arc product pages",
    ),
    *other_family(
        "Intel",
        "Xe-HPC",
        {
            "Data Center GPU Max 1100": ({"fp64": 22.2, "fp32": 22.2, **half(355)}, (48,)),
            "Data Center GPU Max 1550": ({"fp64": 52.4, "fp32": 52.4, **half(839)}, (128,)),
        },
        kind="xpu",
        support=intel_formats(has_fp64=True),
        source="Intel Data Center GPU Max technical overview: Xe cores x ops a clock x peak clock",
    ),
)

SHARED_MEMORY = ("CPU and GPU share the memory, of which macOS leaves about three quarters to the GPU",)


def _apple(generation: str, fp32_rates: Mapping[str, float | None]) -> tuple[KnownGPU, ...]:
    models: Models = {name: ({} if fp32 is None else fp32, ()) for name, fp32 in fp32_rates.items()}
    return other_family(
        "Apple",
        generation,
        models,
        kind="mps",
        support=apple_formats(generation),
        source="Apple newsroom, where it gives a rate",
        tensor_cores=False,
        notes=SHARED_MEMORY,
    )


APPLE = (
    *_apple("M1", {"M1": 2.6, "M1 Pro": 5.2, "M1 Max": 10.4, "M1 Ultra": 21.0}),
    *_apple("M2", {"M2": 3.6, "M2 Pro": None, "M2 Max": None, "M2 Ultra": None}),
    *_apple("M3", {"M3": None, "M3 Pro": None, "M3 Max": None, "M3 Ultra": None}),
    *_apple("M4", {"M4": None, "M4 Pro": None, "M4 Max": None}),
)

GOOGLE = other_family(
    "Google",
    "TPU",
    {
        "TPU v4": ({"bf16": 275}, (32,)),
        "TPU v5e": ({"bf16": 197}, (16,)),
        "TPU v5p": ({"bf16": 459}, (95,)),
        "TPU v6e": ({"bf16": 918}, (32,)),
    },
    kind="tpu",
    support=MappingProxyType({"fp32": "native", "bf16": "native"}),
    source="Google Cloud TPU system architecture pages",
    notes=("not run here: halfstep has no TPU path and nothing of it was tried on one",),
)

ACCELERATORS: tuple[KnownGPU, ...] = (*AMD, *INTEL, *APPLE, *GOOGLE)
