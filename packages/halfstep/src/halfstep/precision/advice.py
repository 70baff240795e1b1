"""Advice for a device: which precision to use, and what is lost. No torch.

The precision comes from the same ladder that training uses; this file explains it.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from halfstep.formats import FP32, find_format
from halfstep.hardware.describe import OP_NAMES, format_speedup
from halfstep.hardware.device_facts import Hardware
from halfstep.precision.decide import decide

NOUN = {"cpu": "CPU", "tpu": "TPU"}

FROM_TABLE = "from published peaks, which no training reaches: run `halfstep detect` on the device itself"


@dataclass(frozen=True, kw_only=True, slots=True)
class HardwareAdvice:
    """The precision to use on a device, and what it loses compared with fp32."""

    precision: str
    headline: str  # one line, such as `use bf16: native, measured 7.1x fp32 on matmul, error 2e-03`
    reason: str  # the ladder's reason, as a plan stores it
    lost: str
    warnings: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def advise(hardware: Hardware) -> HardwareAdvice:
    """Return the fastest precision that the device runs natively."""
    plan = decide("auto", hardware)
    return HardwareAdvice(
        precision=plan.granted,
        headline=_write_headline(plan.granted, hardware),
        reason=plan.reason,
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


def _write_headline(precision: str, hardware: Hardware) -> str:
    if precision == "bf16":
        evidence = [_argue_for(precision, hardware)]
    elif precision == "fp32":
        evidence = _argue_against(("bf16", "fp16"), hardware)
    else:
        evidence = [*_argue_against(("bf16",), hardware), f"{precision} is {_argue_for(precision, hardware)}"]
    scaling = " with loss scaling" if precision == "fp16" else ""
    return f"use {precision}{scaling}: {'; '.join(evidence)}"


def _argue_for(precision: str, hardware: Hardware) -> str:
    shown = hardware.find_measurement("matmul", precision) or hardware.find_best_measurement(precision)
    speedup = hardware.find_speedup(precision)
    if shown is not None:
        return (
            f"native, measured {format_speedup(shown.speedup)}x fp32 on {OP_NAMES[shown.op]}, error {shown.error:.0e}"
        )
    return (
        "native, speed not measured" if speedup is None else f"native, published peak {format_speedup(speedup)}x fp32"
    )


def _argue_against(names: tuple[str, ...], hardware: Hardware) -> list[str]:
    """Explain why these formats are not used, in one sentence per reason."""
    noun = NOUN.get(hardware.kind, "GPU")
    reasons = {
        "missing": f"not available on this {noun}",
        "emulated": f"emulated on this {noun}",
        "native": "slower here",
    }
    sentences = []
    for support, reason in reasons.items():
        group = [name for name in names if hardware.get_support(name) == support]
        if group:
            verb = "is" if len(group) == 1 else "are"
            sentences.append(f"{' and '.join(group)} {verb} {reason}{_format_speeds(group, hardware)}")
    return sentences


def _format_speeds(names: list[str], hardware: Hardware) -> str:
    matmuls = [hardware.find_measurement("matmul", name) for name in names]
    shares = [f"{format_speedup(matmul.speedup)}x" for matmul in matmuls if matmul is not None]
    return f", measured {' and '.join(shares)} fp32 on matmul" if shares else ""
