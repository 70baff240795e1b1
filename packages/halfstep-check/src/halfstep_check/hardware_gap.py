"""What a device cannot do of what the sources ask for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from halfstep_check.declarations import Declaration, Source
from halfstep_check.findings import Finding
from halfstep_check.resolve import rank_claims

Support = Callable[[str], str]

FORMAT_OF = {"fp8": "fp8_e4m3"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """A device's name and how it has a format: native, emulated or missing."""

    name: str
    has: Support


def find_hardware_gaps(sources: Sequence[Source], device: Device) -> list[Finding]:
    """Find sources that ask for a format the device lacks or only emulates."""
    findings = [find_gap(said, device) for _, said in rank_claims(sources, "precision")]
    return [finding for finding in findings if finding is not None]


def find_gap(said: Declaration, device: Device) -> Finding | None:
    support = device.has(FORMAT_OF.get(said.value, said.value))
    if support == "native":
        return None
    rule = "hardware-emulates" if support == "emulated" else "hardware-lacks"
    how = "only emulates it: it runs, but more slowly than fp32" if support == "emulated" else "does not have it"
    return Finding(
        rule=rule,
        message=f"{said.spelled} asks for {said.value}, but {device.name} {how}",
        place=said.place,
        fix=f"use {suggest_format(said.value, device)} on this device",
    )


def suggest_format(precision: str, device: Device) -> str:
    """Return the nearest format that this device computes in natively."""
    words = {"bf16": "bf16", "fp16": "fp16 with loss scaling"}
    native = [word for name, word in words.items() if name != precision and device.has(name) == "native"]
    return native[0] if native and precision in ("bf16", "fp16", "fp8") else "fp32"
