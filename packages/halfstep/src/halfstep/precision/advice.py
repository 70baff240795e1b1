"""Advice for a device: which precision to use, and what is lost. No torch.

The precision comes from the same ladder that training uses; this file explains it.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from halfstep.formats import FP32, find_format
from halfstep.hardware.device_facts import Hardware
from halfstep.precision.decide import decide

FROM_TABLE = "from published peaks, which no training reaches: run `halfstep detect` on the device itself"


@dataclass(frozen=True, kw_only=True, slots=True)
class HardwareAdvice:
    """The precision to use on a device, and what it loses compared with fp32."""

    precision: str
    headline: str  # one line with the ladder's reason, such as `use bf16: native on NVIDIA A100, measured 7.1x fp32`
    lost: str
    warnings: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def advise(hardware: Hardware) -> HardwareAdvice:
    """Return the fastest precision that the device runs natively."""
    plan = decide("auto", hardware)
    scaling = " with loss scaling" if plan.granted == "fp16" else ""
    return HardwareAdvice(
        precision=plan.granted,
        headline=f"use {plan.granted}{scaling}: {plan.reason}",
        lost=describe_loss(plan.granted),
        warnings=(*plan.warnings, *((FROM_TABLE,) if hardware.source == "table" else ())),
    )


def describe_loss(precision: str) -> str:
    """Describe the digits and range that this precision gives up compared with fp32."""
    if precision == "fp32":
        return "nothing"
    chosen = find_format(precision)
    digits = f"matmuls and convolutions keep {chosen.decimal_digits:.1f} of {FP32.decimal_digits:.1f} decimal digits"
    if chosen.exponent_bits == FP32.exponent_bits:
        return f"{digits}; the range stays that of fp32"
    return (
        f"{digits}; the range shrinks to {chosen.smallest_subnormal:.0e} … {chosen.largest:.0f}, "
        "so small gradients need loss scaling"
    )
