"""AMD, Intel, Apple and Google: their part of the table of known accelerators."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from halfstep.hardware.known import Checked, KnownGPU, Models, family, half
from halfstep.hardware.support import amd_formats, apple_formats, intel_formats

TWO_DIES = ("one card is two devices for torch, each with half the memory and half the rate",)
PROCESSORS = "stream processors and boost clock as reviews quote AMD"
ENGINES = "lanes of the vector engines and graphics clock as Intel's pages give them; matrix engines by their width"
FNUZ = ("its fp8 is the fnuz variant, not the e4m3fn and e5m2 that halfstep means by fp8",)

AMD = (
    *family(
        "AMD",
        "CDNA1",
        {"MI100": ({"fp64": 11.5, "fp32": 46.1, "bf16": 92.3, "fp16": 184.6}, (32,))},
        kind="rocm",
        support=amd_formats("gfx908"),
        source="AMD Instinct MI100 datasheet, matrix rates",
        checked="secondary",
    ),
    *family(
        "AMD",
        "CDNA2",
        {"MI210": ({"fp64": 45.3, "fp32": 45.3, **half(181)}, (64,))},
        kind="rocm",
        support=amd_formats("gfx90a"),
        source="AMD Instinct MI210 datasheet, matrix rates",
        checked="secondary",
    ),
    *family(
        "AMD",
        "CDNA2",
        {"MI250": ({"fp64": 90.5, "fp32": 90.5, **half(362.1)}, (128,))},
        kind="rocm",
        support=amd_formats("gfx90a"),
        source="AMD Instinct MI250 datasheet, matrix rates",
        checked="secondary",
        notes=TWO_DIES,
    ),
    *family(
        "AMD",
        "CDNA2",
        {"MI250X": ({"fp64": 95.7, "fp32": 95.7, **half(383)}, (128,))},
        kind="rocm",
        support=amd_formats("gfx90a"),
        source="AMD Instinct MI250X datasheet, matrix rates",
        checked="datasheet",
        notes=TWO_DIES,
    ),
    *family(
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
        checked="secondary",
        notes=FNUZ,
    ),
    *family(
        "AMD",
        "CDNA4",
        {
            "MI350X": ({"fp64": 72.1, "fp32": 144.2, **half(2306.9), "fp8_e4m3": 4613.9}, (288,)),
            "MI355X": ({"fp64": 78.6, "fp32": 157.3, **half(2516.6), "fp8_e4m3": 5033.2}, (288,)),
        },
        kind="rocm",
        support=amd_formats("gfx950"),
        source="AMD Instinct MI350X and MI355X datasheets, dense matrix rates",
        checked="secondary",
    ),
    *family(
        "AMD",
        "RDNA2",
        {
            "RX 6600 XT": (10.6, (8,), (2048, 2589)),
            "RX 6700 XT": (13.2, (12,), (2560, 2581)),
            "RX 6800": (16.2, (16,), (3840, 2105)),
            "RX 6800 XT": (20.7, (16,), (4608, 2250)),
            "RX 6900 XT": (23.0, (16,), (5120, 2250)),
            "RX 6950 XT": (23.7, (16,), (5120, 2310)),
        },
        kind="rocm",
        support=amd_formats("gfx1030"),
        ratios={"fp16": 2},
        tensor_cores=False,
        source=PROCESSORS,
    ),
    *family(
        "AMD",
        "RDNA3",
        {
            "RX 7600": (21.7, (8,), (4096, 2655)),
            "RX 7700 XT": (35.2, (12,), (6912, 2544)),
            "RX 7800 XT": (37.3, (16,), (7680, 2430)),
            "RX 7900 XT": (51.5, (20,), (10752, 2400)),
            "RX 7900 XTX": (61.4, (24,), (12288, 2499)),
        },
        kind="rocm",
        support=amd_formats("gfx1100"),
        ratios=half(2),
        source=PROCESSORS + ", each issuing two operations; bf16 as fp16, by the RDNA3 ISA guide",
    ),
    *family(
        "AMD",
        "RDNA3",
        {"RX 7900 GRE": ({}, (16,)), "Radeon PRO W7800": ({}, (32,)), "Radeon PRO W7900": ({}, (48,))},
        kind="rocm",
        support=amd_formats("gfx1100"),
        source="AMD's list of GPUs; no rate of it was verified",
        checked="recalled",
    ),
    *family(
        "AMD",
        "RDNA4",
        {"RX 9060 XT": ({}, (16, 8))},
        kind="rocm",
        support=amd_formats("gfx1200"),
        source="AMD's list of GPUs; no rate of it was verified",
        checked="recalled",
    ),
    *family(
        "AMD",
        "RDNA4",
        {
            "RX 9070": (36.1, (16,), (7168, 2520)),
            "RX 9070 XT": (48.7, (16,), (8192, 2970)),
        },
        kind="rocm",
        support=amd_formats("gfx1201"),
        ratios={**half(4), "fp8_e4m3": 8},
        source=PROCESSORS + ", each issuing two operations; matrix rates dense, as AMD gives them for the RX 9070 XT",
    ),
)

INTEL = (
    *family(
        "Intel",
        "Xe-HPG",
        {
            "Arc A380": (4.1, (6,), (1024, 2000)),
            "Arc A750": (14.7, (8,), (3584, 2050)),
            "Arc A770": (17.2, (16, 8), (4096, 2100)),
        },
        kind="xpu",
        support=intel_formats(has_fp64=False),
        ratios=half(8),
        source=ENGINES,
    ),
    *family(
        "Intel",
        "Xe2",
        {"Arc B570": (11.5, (10,), (2304, 2500)), "Arc B580": (13.7, (12,), (2560, 2670))},
        kind="xpu",
        support=intel_formats(has_fp64=True),
        ratios={"fp64": 1 / 8, **half(8)},
        source=ENGINES,
    ),
    *family(
        "Intel",
        "Xe-HPC",
        {
            "Data Center GPU Max 1100": (22.2, (48,), (7168, 1550)),
            "Data Center GPU Max 1550": (52.4, (128,), (16384, 1600)),
        },
        kind="xpu",
        support=intel_formats(has_fp64=True),
        ratios={"fp64": 1, **half(16)},
        source="Xe cores with 512-bit vector and 4096-bit matrix engines, at peak clock",
    ),
)

SHARED_MEMORY = ("CPU and GPU share the memory, of which macOS leaves about three quarters to the GPU",)


def _apple(generation: str, fp32_rates: Mapping[str, float | None], *, checked: Checked) -> tuple[KnownGPU, ...]:
    models: Models = {name: ({} if fp32 is None else fp32, ()) for name, fp32 in fp32_rates.items()}
    return family(
        "Apple",
        generation,
        models,
        kind="mps",
        support=apple_formats(generation),
        source="Apple newsroom" if checked == "secondary" else "Apple publishes no rate",
        checked=checked,
        tensor_cores=False,
        notes=SHARED_MEMORY,
    )


APPLE = (
    *_apple("M1", {"M1": 2.6, "M1 Pro": 5.2, "M1 Max": 10.4, "M1 Ultra": 21.0}, checked="secondary"),
    *_apple("M2", {"M2": 3.6}, checked="secondary"),
    *_apple("M2", dict.fromkeys(("M2 Pro", "M2 Max", "M2 Ultra")), checked="recalled"),
    *_apple("M3", dict.fromkeys(("M3", "M3 Pro", "M3 Max", "M3 Ultra")), checked="recalled"),
    *_apple("M4", dict.fromkeys(("M4", "M4 Pro", "M4 Max")), checked="recalled"),
    *_apple("M5", dict.fromkeys(("M5",)), checked="recalled"),
)

GOOGLE = family(
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
    checked="secondary",
    notes=("not run here: halfstep has no TPU path and nothing of it was tried on one",),
)

ACCELERATORS: tuple[KnownGPU, ...] = (*AMD, *INTEL, *APPLE, *GOOGLE)
