"""Probe the devices of this machine without measuring them. `measure` adds speed and error."""

from __future__ import annotations

import dataclasses
import re

from halfstep.errors import HardwareError, format_count
from halfstep.hardware.device_facts import Hardware
from halfstep.hardware.driver import Accelerator, Driver
from halfstep.hardware.gpus import find_known
from halfstep.hardware.support import has_matrix_units, list_cpu_formats, list_formats

VENDORS = {"cuda": "NVIDIA", "rocm": "AMD", "xpu": "Intel", "mps": "Apple"}
CPU_VENDORS = ("Intel", "AMD", "Apple", "Arm", "Fujitsu", "Ampere")


def probe(device: str | None = None, *, driver: Driver | None = None) -> Hardware:
    """Return the facts of one device: the one named (`cuda:1`, `mps`, `cpu`), or the best one."""
    driver = driver or Driver()
    return _add_free_memory(_pick(_list_devices(driver), "auto" if device is None else device), driver)


def probe_all(*, driver: Driver | None = None) -> tuple[Hardware, ...]:
    """Return the facts of every device, best first; the CPU is always included, as the last."""
    driver = driver or Driver()
    return tuple(_add_free_memory(hardware, driver) for hardware in _list_devices(driver))


def _list_devices(driver: Driver) -> tuple[Hardware, ...]:
    torch_version = driver.read_torch_version()
    accelerators = [_describe_accelerator(seen, torch_version) for seen in driver.list_accelerators()]
    return (*accelerators, _describe_cpu(driver, torch_version))


def _add_free_memory(hardware: Hardware, driver: Driver) -> Hardware:
    if hardware.kind == "cpu":
        return hardware
    return dataclasses.replace(hardware, memory_free_bytes=driver.read_free_bytes(hardware.device))


def _pick(devices: tuple[Hardware, ...], name: str) -> Hardware:
    if name == "auto":
        return devices[0]
    asked = name.lower()
    for hardware in devices:
        # `cuda` means `cuda:0`, and `rocm` is a common name for a device that torch calls cuda.
        if asked in (hardware.device, hardware.device.removesuffix(":0"), hardware.kind):
            return hardware
    raise HardwareError(
        f"no device {name!r} on this machine",
        why=f"torch {devices[-1].torch_version} finds " + ", ".join(f"{d.device} ({d.name})" for d in devices),
        fix="use one of " + ", ".join(["auto", *(d.device for d in devices)]),
    )


def _describe_accelerator(seen: Accelerator, torch_version: str) -> Hardware:
    known = find_known(seen.name)
    published = ("published_tflops", "published_source", "published_check", "notes")
    chip = seen.name if seen.kind == "mps" else seen.architecture
    support = list_formats(seen.kind, seen.capability, chip, has_fp64=seen.has_fp64)
    return Hardware(
        kind=seen.kind,
        device=seen.device,
        name=seen.name,
        vendor=VENDORS[seen.kind],
        capability=seen.capability,
        architecture=known.facts.architecture if known else seen.architecture,
        memory_total_bytes=seen.memory_total_bytes,
        support=support,
        tensor_cores=has_matrix_units(seen.kind, seen.capability, seen.name, support),
        uuid=seen.uuid,
        driver=seen.driver,
        torch_version=torch_version,
        **({name: getattr(known.facts, name) for name in published} if known else {}),
    )


def _describe_cpu(driver: Driver, torch_version: str) -> Hardware:
    processor = driver.describe_processor()
    found = re.findall(r"^(model name|flags|Features)\s*:\s*(.*)$", processor.cpuinfo, re.MULTILINE)
    fields = dict(reversed(found))  # of the first core
    # Linux gives ARM cores no name, and calls their flags "Features".
    name = fields.get("model name", "").strip() or processor.brand or "CPU"
    flags = {*fields.get("flags", "").split(), *fields.get("Features", "").split(), *processor.features}
    return Hardware(
        kind="cpu",
        device="cpu",
        name=name,
        vendor=next((vendor for vendor in CPU_VENDORS if vendor.lower() in name.lower()), "unknown"),
        architecture=format_count(processor.cores, "core"),
        memory_total_bytes=processor.memory_total_bytes,
        memory_free_bytes=processor.memory_free_bytes,
        support=list_cpu_formats(flags),
        tensor_cores="amx_tile" in flags,
        driver=processor.kernel,
        torch_version=torch_version,
    )
