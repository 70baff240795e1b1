"""NVIDIA devices whose formats and memory are known, but not one rate: it is up to the laptop, or not verified.

Capabilities as in NVIDIA's list of CUDA GPUs, where a laptop GPU has that of the desktop card of its generation.
"""

from __future__ import annotations

from halfstep.hardware.known import KnownGPU, Models, nvidia_family

LAPTOP = ("the laptop's maker sets its power and clocks, so there is no one rate: run `halfstep detect` on it",)
SOURCE = "NVIDIA's list of CUDA GPUs; memory as vendors' pages give it"


def _unrated(
    architecture: str,
    capability: tuple[int, int],
    memory_gb: dict[str, tuple[int, ...]],
    *,
    notes: tuple[str, ...] = (),
) -> tuple[KnownGPU, ...]:
    models: Models = {name: ({}, sizes) for name, sizes in memory_gb.items()}
    return nvidia_family(architecture, capability, models, source=SOURCE, checked="recalled", notes=notes)


def _laptops(
    architecture: str, capability: tuple[int, int], memory_gb: dict[str, tuple[int, ...]]
) -> tuple[KnownGPU, ...]:
    named = {f"{name} Laptop": sizes for name, sizes in memory_gb.items()}
    return _unrated(architecture, capability, named, notes=LAPTOP)


UNRATED = (
    *_laptops("Turing", (7, 5), {"GTX 1650": (4,), "GTX 1650 Ti": (4,), "GTX 1660 Ti": (6,)}),
    *_laptops("Turing", (7, 5), {"RTX 2060": (6,), "RTX 2070": (8,), "RTX 2080": (8,), "RTX 2080 Super": (8,)}),
    *_laptops(
        "Ampere",
        (8, 6),
        {
            "RTX 2050": (4,),
            "RTX 3050": (4, 6),
            "RTX 3050 Ti": (4,),
            "RTX 3060": (6,),
            "RTX 3070": (8,),
            "RTX 3070 Ti": (8,),
            "RTX 3080": (8, 16),
            "RTX 3080 Ti": (16,),
            "RTX A500": (4,),
            "RTX A1000": (4, 6),
            "RTX A2000": (4, 8),
            "RTX A3000": (6, 12),
            "RTX A4000": (8,),
            "RTX A5000": (16,),
        },
    ),
    *_laptops(
        "Ada",
        (8, 9),
        {
            "RTX 4050": (6,),
            "RTX 4060": (8,),
            "RTX 4070": (8,),
            "RTX 4080": (12,),
            "RTX 4090": (16,),
            "RTX 500 Ada": (4,),
            "RTX 1000 Ada": (6,),
            "RTX 2000 Ada": (8,),
            "RTX 3000 Ada": (8,),
            "RTX 3500 Ada": (12,),
            "RTX 4000 Ada": (12,),
            "RTX 5000 Ada": (16,),
        },
    ),
    *_laptops(
        "Blackwell",
        (12, 0),
        {
            "RTX 5050": (8,),
            "RTX 5060": (8,),
            "RTX 5070": (8,),
            "RTX 5070 Ti": (12,),
            "RTX 5080": (16,),
            "RTX 5090": (24,),
        },
    ),
    *_unrated("Turing", (7, 5), {"GTX 1650 Super": (4,), "T1000": (4, 8)}),
    *_unrated("Ampere", (8, 6), {"A10G": (24,), "RTX A5500": (24,)}),
    *_unrated("Ampere", (8, 6), {"A16": (16,)}, notes=("one card is four devices for torch, each with 16 GB",)),
    *_unrated("Ampere", (8, 7), {"Jetson AGX Orin": (32, 64), "Jetson Orin NX": (8, 16), "Jetson Orin Nano": (4, 8)}),
    *_unrated("Ada", (8, 9), {"L2": (24,), "RTX 5880 Ada": (48,)}),
    *_unrated("Hopper", (9, 0), {"H800": (80,), "H800 PCIe": (80,)}),
    *_unrated("Blackwell", (10, 0), {"B100": (192,)}),
    *_unrated("Blackwell", (11, 0), {"Jetson Thor": (128,)}),
    *_unrated(
        "Blackwell",
        (12, 0),
        {
            "RTX PRO 6000 Blackwell Server": (96,),
            "RTX PRO 5000 Blackwell": (48, 72),
            "RTX PRO 4500 Blackwell": (32,),
            "RTX PRO 4000 Blackwell": (24,),
            "RTX PRO 2000 Blackwell": (16,),
        },
    ),
    *_unrated("Blackwell", (12, 1), {"GB10": (128,)}, notes=("CPU and GPU share the memory",)),
)
