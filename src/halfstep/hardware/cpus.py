"""CPUs: name and flags out of what the operating system says. No torch."""

from __future__ import annotations

import re

from halfstep.hardware.driver import Processor

ARM_CORES = {
    ("0x41", "0xd03"): "Arm Cortex-A53",
    ("0x41", "0xd07"): "Arm Cortex-A57",
    ("0x41", "0xd08"): "Arm Cortex-A72",
    ("0x41", "0xd0b"): "Arm Cortex-A76",
    ("0x41", "0xd0c"): "Arm Neoverse-N1",
    ("0x41", "0xd40"): "Arm Neoverse-V1",
    ("0x41", "0xd49"): "Arm Neoverse-N2",
    ("0x41", "0xd4f"): "Arm Neoverse-V2",
    ("0x41", "0xd84"): "Arm Neoverse-V3",
    ("0x41", "0xd8e"): "Arm Neoverse-N3",
    ("0x46", "0x001"): "Fujitsu A64FX",
    ("0xc0", "0xac3"): "Ampere-1",
}
"""(implementer, part) of the MIDR register, as in Arm's core manuals: Linux gives ARM cores no model name."""


def cpu_name(processor: Processor) -> str:
    """The model by name, from cpuinfo, macOS, or the ARM part number."""
    if named := re.search(r"^model name\s*:\s*(.+)$", processor.cpuinfo, re.MULTILINE):
        return named.group(1).strip()
    part = (_field(processor.cpuinfo, "CPU implementer"), _field(processor.cpuinfo, "CPU part"))
    return ARM_CORES.get(part) or processor.brand or "CPU"


def cpu_vendor(name: str) -> str:
    vendors = ("Intel", "AMD", "Apple", "Arm", "Fujitsu", "Ampere")
    return next((vendor for vendor in vendors if vendor.lower() in name.lower()), "unknown")


def cpu_flags(processor: Processor) -> frozenset[str]:
    """x86 calls the line `flags`, ARM `Features`."""
    listed = _field(processor.cpuinfo, "flags") or _field(processor.cpuinfo, "Features")
    return frozenset(listed.split()) | processor.features


def _field(cpuinfo: str, key: str) -> str:
    found = re.search(rf"^{key}\s*:\s*(.*)$", cpuinfo, re.MULTILINE)
    return found.group(1).strip() if found else ""
