"""NVIDIA's part of the table of known accelerators.

Every capability was compared with NVIDIA's lists of CUDA GPUs, current and legacy; the RTX 4070 Super, 4070 Ti Super
and 4080 Super, which those leave out, with Wikipedia's.
"""

from __future__ import annotations

from halfstep.hardware.known import half, nvidia_family

CORES = "CUDA cores and boost clock as Wikipedia's list of NVIDIA GPUs and vendors' pages give them"

NVIDIA = (
    *nvidia_family("Maxwell", (5, 0), {"GTX 750 Ti": (1.4, (2,), (640, 1085))}, source=CORES),
    *nvidia_family(
        "Maxwell",
        (5, 2),
        {
            "GTX 960": (2.4, (2, 4), (1024, 1178)),
            "GTX 970": (3.9, (4,), (1664, 1178)),
            "GTX 980": (5.0, (4,), (2048, 1216)),
            "GTX 980 Ti": (6.1, (6,), (2816, 1076)),
            "GTX Titan X": (6.7, (12,), (3072, 1089)),
            "Tesla M40": (6.8, (12, 24), (3072, 1114)),
            "Tesla M60": (4.8, (8,), (2048, 1178)),
        },
        source=CORES,
    ),
    *nvidia_family(
        "Pascal",
        (6, 0),
        {
            "P100": ({"fp64": 5.3, "fp32": 10.6, "fp16": 21.2}, (16,)),
            "P100 PCIe": ({"fp64": 4.7, "fp32": 9.3, "fp16": 18.7}, (16, 12)),
        },
        source="NVIDIA Tesla P100 datasheets",
        checked="secondary",
    ),
    *nvidia_family(
        "Pascal",
        (6, 1),
        {
            "GTX 1050": (1.9, (2,), (640, 1455)),
            "GTX 1050 Ti": (2.1, (4,), (768, 1392)),
            "GTX 1060": (4.4, (6,), (1280, 1708)),
            "GTX 1060 3GB": (3.9, (3,), (1152, 1708)),
            "GTX 1070": (6.5, (8,), (1920, 1683)),
            "GTX 1070 Ti": (8.2, (8,), (2432, 1683)),
            "GTX 1080": (8.9, (8,), (2560, 1733)),
            "GTX 1080 Ti": (11.3, (11,), (3584, 1582)),
            "Titan Xp": (12.1, (12,), (3840, 1582)),
            "Tesla P4": (5.5, (8,), (2560, 1063)),
            "Tesla P40": (11.8, (24,), (3840, 1531)),
        },
        ratios={"fp16": 1 / 64},
        notes=("its own fp16 arithmetic runs at 1/64 of the fp32 rate, so libraries compute fp16 in fp32",),
        source=CORES + "; fp16 rate from the CUDA programming guide",
    ),
    *nvidia_family(
        "Volta",
        (7, 0),
        {
            "V100": ({"fp64": 7.8, "fp32": 15.7, "fp16": 125}, (16, 32)),
            "V100 PCIe": ({"fp64": 7, "fp32": 14, "fp16": 112}, (16, 32)),
            "V100S": ({"fp64": 8.2, "fp32": 16.4, "fp16": 130}, (32,)),
        },
        source="NVIDIA V100 and V100S datasheets",
        checked="secondary",
    ),
    *nvidia_family(
        "Volta",
        (7, 0),
        {"Titan V": (14.9, (12,), (5120, 1455))},
        ratios={"fp64": 1 / 2, "fp16": 8},
        source=CORES + "; ratios of the V100",
    ),
    *nvidia_family(
        "Turing",
        (7, 5),
        {
            "GTX 1650": (3.0, (4,), (896, 1665)),
            "GTX 1660": (5.0, (6,), (1408, 1785)),
            "GTX 1660 Super": (5.0, (6,), (1408, 1785)),
            "GTX 1660 Ti": (5.4, (6,), (1536, 1770)),
        },
        ratios={"fp16": 2},
        source=CORES,
    ),
    *nvidia_family(
        "Turing",
        (7, 5),
        {
            "RTX 2060": (6.5, (6,), (1920, 1680)),
            "RTX 2060 12GB": (7.2, (12,), (2176, 1650)),
            "RTX 2060 Super": (7.2, (8,), (2176, 1650)),
            "RTX 2070": (7.5, (8,), (2304, 1620)),
            "RTX 2070 Super": (9.1, (8,), (2560, 1770)),
            "RTX 2080": (10.1, (8,), (2944, 1710)),
            "RTX 2080 Super": (11.2, (8,), (3072, 1815)),
            "RTX 2080 Ti": (13.4, (11,), (4352, 1545)),
        },
        ratios={"fp16": 4},
        source=CORES + "; tensor cores at half rate for fp32 accumulation",
    ),
    *nvidia_family(
        "Turing",
        (7, 5),
        {
            "Titan RTX": (16.3, (24,), (4608, 1770)),
            "Quadro RTX 4000": (7.1, (8,), (2304, 1545)),
            "Quadro RTX 5000": (11.2, (16,), (3072, 1815)),
            "Quadro RTX 6000": (16.3, (24,), (4608, 1770)),
            "Quadro RTX 8000": (16.3, (48,), (4608, 1770)),
        },
        ratios={"fp16": 8},
        source=CORES + "; tensor cores at full rate for fp32 accumulation",
    ),
    *nvidia_family(
        "Turing",
        (7, 5),
        {"T4": ({"fp32": 8.1, "fp16": 65}, (16,))},
        source="NVIDIA T4 datasheet",
        checked="secondary",
    ),
    *nvidia_family(
        "Ampere",
        (8, 0),
        {
            "A100": ({"fp64": 19.5, "fp32": 19.5, "tf32": 156, **half(312)}, (40, 80)),
            "A30": ({"fp64": 10.3, "fp32": 10.3, "tf32": 82, **half(165)}, (24,)),
        },
        source="NVIDIA A100 and A30 datasheets, dense",
        checked="secondary",
    ),
    *nvidia_family(
        "Ampere",
        (8, 6),
        {
            "RTX 3050": (9.1, (8,), (2560, 1777)),
            "RTX 3050 6GB": (6.8, (6,), (2304, 1470)),
            "RTX 3060": (12.7, (12, 8), (3584, 1777)),
            "RTX 3060 Ti": (16.2, (8,), (4864, 1665)),
            "RTX 3070": (20.3, (8,), (5888, 1725)),
            "RTX 3070 Ti": (21.7, (8,), (6144, 1770)),
            "RTX 3080": (29.8, (10,), (8704, 1710)),
            "RTX 3080 12GB": (30.6, (12,), (8960, 1710)),
            "RTX 3080 Ti": (34.1, (12,), (10240, 1665)),
            "RTX 3090": (35.6, (24,), (10496, 1695)),
            "RTX 3090 Ti": (40.0, (24,), (10752, 1860)),
        },
        ratios={"tf32": 1, **half(2)},
        source=CORES + "; dense, fp32 accumulation",
    ),
    *nvidia_family(
        "Ampere",
        (8, 6),
        {
            "RTX A2000": (8.0, (6, 12), (3328, 1200)),
            "RTX A4000": (19.2, (16,), (6144, 1560)),
            "RTX A5000": (27.8, (24,), (8192, 1695)),
            "RTX A6000": (38.7, (48,), (10752, 1800)),
            "A10": (31.2, (24,), (9216, 1695)),
            "A40": (37.4, (48,), (10752, 1740)),
        },
        ratios={"tf32": 2, **half(4)},
        source=CORES + "; dense, as NVIDIA's table for the A40 has it",
    ),
    *nvidia_family(
        "Ada",
        (8, 9),
        {
            "RTX 4060": (15.1, (8,), (3072, 2460)),
            "RTX 4060 Ti": (22.1, (8, 16), (4352, 2535)),
            "RTX 4070": (29.1, (12,), (5888, 2475)),
            "RTX 4070 Super": (35.5, (12,), (7168, 2475)),
            "RTX 4070 Ti": (40.1, (12,), (7680, 2610)),
            "RTX 4070 Ti Super": (44.1, (16,), (8448, 2610)),
            "RTX 4080": (48.7, (16,), (9728, 2505)),
            "RTX 4080 Super": (52.2, (16,), (10240, 2550)),
            "RTX 4090": (82.6, (24,), (16384, 2520)),
        },
        ratios={"tf32": 1, **half(2), "fp8_e4m3": 4},
        source=CORES + "; dense, fp32 accumulation",
    ),
    *nvidia_family(
        "Ada",
        (8, 9),
        {
            "RTX 6000 Ada": ({"fp32": 91.1, "tf32": 182.1, **half(364.2), "fp8_e4m3": 728.5}, (48,)),
            "L4": ({"fp32": 30.3, "tf32": 60, **half(121), "fp8_e4m3": 242.5}, (24,)),
        },
        source="NVIDIA RTX 6000 Ada and L4 datasheets, dense",
        checked="secondary",
    ),
    *nvidia_family(
        "Ada",
        (8, 9),
        {
            "L40": ({"fp32": 90.5, "tf32": 90.5, **half(181.05), "fp8_e4m3": 362}, (48,)),
            "L40S": ({"fp32": 91.6, "tf32": 183, **half(362.05), "fp8_e4m3": 733}, (48,)),
        },
        source="NVIDIA L40 and L40S datasheets, dense",
        checked="datasheet",
    ),
    *nvidia_family(
        "Hopper",
        (9, 0),
        {
            "H100": ({"fp64": 67, "fp32": 67, "tf32": 494.7, **half(989.4), "fp8_e4m3": 1978.9}, (80,)),
            "H100 PCIe": ({"fp64": 51, "fp32": 51, "tf32": 378, **half(756), "fp8_e4m3": 1513}, (80,)),
            "H100 NVL": ({"fp64": 60, "fp32": 60, "tf32": 417.5, **half(835.5), "fp8_e4m3": 1670.5}, (94,)),
            "H200": ({"fp64": 67, "fp32": 67, "tf32": 494.7, **half(989.4), "fp8_e4m3": 1978.9}, (141,)),
            "H200 NVL": ({"fp64": 60, "fp32": 60, "tf32": 417.5, **half(835.5), "fp8_e4m3": 1670.5}, (141,)),
            "GH200": ({"fp64": 67, "fp32": 67, "tf32": 494.7, **half(989.4), "fp8_e4m3": 1978.9}, (96, 144)),
        },
        source="NVIDIA H100, H200 and GH200 datasheets, dense",
        checked="secondary",
    ),
    *nvidia_family(
        "Blackwell",
        (10, 0),
        {
            "B200": ({"fp64": 37, "fp32": 75, "tf32": 1100, **half(2250), "fp8_e4m3": 4500}, (180, 192)),
            "GB200": ({"fp64": 40, "fp32": 80, "tf32": 1250, **half(2500), "fp8_e4m3": 5000}, (186,)),
        },
        source="NVIDIA HGX B200 and GB200 NVL72 datasheets, dense",
        checked="datasheet",
    ),
    *nvidia_family(
        "Blackwell",
        (12, 0),
        {
            "RTX 5060": (19.2, (8,), (3840, 2497)),
            "RTX 5060 Ti": (23.7, (8, 16), (4608, 2572)),
            "RTX 5070": (30.9, (12,), (6144, 2512)),
            "RTX 5070 Ti": (43.9, (16,), (8960, 2452)),
            "RTX 5080": (56.3, (16,), (10752, 2617)),
            "RTX 5090": (104.8, (32,), (21760, 2407)),
        },
        ratios={"tf32": 1, **half(2), "fp8_e4m3": 4},
        source=CORES + "; dense, fp32 accumulation",
    ),
)
