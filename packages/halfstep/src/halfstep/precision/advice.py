"""Advice for a device: which precision and settings to use, and what is lost. No torch.

The precision comes from the same ladder that training uses; this file explains it and adds matching settings.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from halfstep.errors import format_bytes
from halfstep.formats import FP32, find_format
from halfstep.hardware.describe import OP_NAMES, format_rate, format_speedup
from halfstep.hardware.device_facts import Hardware
from halfstep.precision.decide import decide

NOUN = {"cpu": "CPU", "tpu": "TPU"}

FROM_TABLE = "from published peaks, which no training reaches: run `halfstep detect` on the device itself"

LAYOUT_GAIN = 1.05  # a layout that gains less than this is within the noise of a few samples

EXAMPLE_SAMPLE_BYTES = 1.29 * 2**30
"""Saved for backward by a 64-channel U-Net on one 512x512 image in fp32, counted with saved-tensor hooks."""
EXAMPLE_FIXED_BYTES = 31_037_698 * 16  # its weights, gradients and Adam's two moments, in fp32
USABLE_MEMORY = 0.8  # the rest goes to workspaces, fragmentation and the CUDA context


@dataclass(frozen=True, kw_only=True, slots=True)
class AdvisedSetting:
    """One setting of the advice, with its reason."""

    name: str
    value: str | bool | int
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class HardwareAdvice:
    """The precision and settings to use on a device, and what they lose compared with fp32."""

    precision: str
    headline: str  # one line, such as `use bf16: native, measured 7.1x fp32 on matmul, error 2e-03`
    reason: str  # the ladder's reason, as a plan stores it
    settings: tuple[AdvisedSetting, ...]
    lost: str
    warnings: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def advise(hardware: Hardware) -> HardwareAdvice:
    """Return the fastest precision the device runs natively, and the settings that go with it."""
    plan = decide("auto", hardware)
    return HardwareAdvice(
        precision=plan.granted,
        headline=_write_headline(plan.granted, hardware),
        reason=plan.reason,
        settings=(
            AdvisedSetting(name="precision", value=plan.granted, reason=plan.reason),
            _advise_loss_scaling(plan.granted),
            _advise_channels_last(plan.granted, hardware),
            _advise_compile(hardware),
            *_advise_batch_size(plan.granted, hardware),
        ),
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


def _advise_loss_scaling(precision: str) -> AdvisedSetting:
    if precision == "fp16":
        return AdvisedSetting(name="loss_scaling", value=True, reason="gradients below 6e-08 become zero in fp16")
    return AdvisedSetting(name="loss_scaling", value=False, reason="gradients keep the range of fp32")


def _advise_channels_last(precision: str, hardware: Hardware) -> AdvisedSetting:
    nchw, nhwc = hardware.find_measurement("conv_nchw", precision), hardware.find_measurement("conv_nhwc", precision)
    gain, measured = hardware.compute_layout_gain(precision), hardware.measurements
    if nchw and nhwc and gain is not None:
        rates = f"{format_rate(nhwc.tflops, measured)} against {format_rate(nchw.tflops, measured)}"
        reason = f"convolutions in {precision} run {format_speedup(gain)}x as fast in it: {rates} (measured)"
        return AdvisedSetting(name="channels_last", value=gain > LAYOUT_GAIN, reason=reason)
    if hardware.tensor_cores and hardware.kind in ("cuda", "rocm", "xpu"):
        return AdvisedSetting(
            name="channels_last", value=True, reason="matrix units read images in this layout; not measured"
        )
    return AdvisedSetting(name="channels_last", value=False, reason="no gain is known here; not measured")


def _advise_compile(hardware: Hardware) -> AdvisedSetting:
    if hardware.kind == "cuda" and hardware.capability is not None and hardware.capability < (7, 0):
        return AdvisedSetting(name="compile", value=False, reason="torch.compile's Triton needs sm_70 or newer")
    if hardware.kind in ("cuda", "rocm", "xpu"):
        return AdvisedSetting(
            name="compile", value=True, reason="fuses the operations between matmuls; pays off after minutes"
        )
    reasons = {
        "cpu": "needs a C++ compiler and minutes; worth a try for long runs only",
        "mps": "torch.compile is young on Apple GPUs",
        "tpu": "halfstep has no TPU path",
    }
    return AdvisedSetting(name="compile", value=False, reason=reasons[hardware.kind])


def _advise_batch_size(precision: str, hardware: Hardware) -> tuple[AdvisedSetting, ...]:
    memory = hardware.memory_total_bytes if hardware.memory_free_bytes is None else hardware.memory_free_bytes
    if not memory:
        return ()
    sample_bytes = EXAMPLE_SAMPLE_BYTES * (1 if precision in ("fp32", "tf32") else 0.5)
    fits = int((memory * USABLE_MEMORY - EXAMPLE_FIXED_BYTES) / sample_bytes)
    sizes = f"{format_bytes(sample_bytes, digits=3)} per sample in {format_bytes(memory)}"
    reason = f"for a 64-channel U-Net at 512x512: {sizes}"
    if fits < 1:
        return (
            AdvisedSetting(name="batch_size", value=1, reason="even one 512x512 image for a 64-channel U-Net is tight"),
        )
    return (AdvisedSetting(name="batch_size", value=2 ** (fits.bit_length() - 1), reason=reason),)
