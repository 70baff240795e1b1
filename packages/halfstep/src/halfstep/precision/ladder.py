"""The ladder: which precision a device gets, and why. Pure facts in, a Grant out; no torch.

    fp8 → bf16 → fp16 (+ loss scaling) → tf32 → fp32

A rung is missing if the device does not have the format, only emulates it, or is not faster with it. If the requested
rung is missing, the next lower one that exists is granted, with a warning; under `strict` that is an error.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from halfstep.errors import HardwareError
from halfstep.hardware.describe import format_speedup
from halfstep.hardware.device_facts import Hardware

LADDER = ("fp8", "bf16", "fp16", "tf32", "fp32")
AUTO_RUNGS = LADDER[1:]  # fp8 changes what a model computes too much to be chosen unasked

PRECISION_FORMATS = {
    "fp8": ("fp8_e4m3", "fp8_e5m2"),
    "bf16": ("bf16",),
    "bf16-true": ("bf16",),
    "fp16": ("fp16",),
    "tf32": ("tf32",),
    "fp32": ("fp32",),
}

TIE = 1.1  # bf16 is taken over a rung less than this much faster: its range needs no loss scaling


@dataclass(frozen=True, kw_only=True, slots=True)
class Grant:
    """What one precision request got on one device: the precision that runs, and why."""

    asked: str
    precision: str
    reason: str
    simulated: bool = False
    warning: str = ""

    @property
    def compute(self) -> str:
        return self.precision.removesuffix("-true")

    @property
    def storage(self) -> str:
        """Return the storage format of trainable weights: fp32, except under a -true precision."""
        return self.compute if self.precision.endswith("-true") else "fp32"

    def explain(self) -> str:
        """Return why a module that a pattern names has this precision."""
        return self.reason if self.warning else f"asked for {self.asked}"

    @property
    def is_mixed(self) -> bool:
        """True if matmuls run in a format narrower than fp32, so that autocast is on."""
        return self.compute in ("bf16", "fp16", "fp8")


def grant(asked: str, hardware: Hardware, *, strict: bool = False, simulate: bool = False) -> Grant:
    """Choose the precision that runs for this request on this device."""
    if simulate and asked != "fp32":
        return _grant_simulated(asked, hardware)
    if asked == "auto":
        return _grant_fastest(hardware)
    missing = explain_lack(asked, hardware)
    if not missing:
        return Grant(asked=asked, precision=asked, reason=_argue_for(asked, hardware))
    return _step_down(asked, hardware, missing, strict=strict)


def explain_lack(precision: str, hardware: Hardware) -> str:
    """Explain why the device should not run this precision; return an empty string if it should."""
    if precision == "fp32":
        return ""
    formats = PRECISION_FORMATS[precision]
    for name in formats:
        if hardware.get_support(name) == "missing":
            return f"{hardware.name} has no {name}"
        if hardware.get_support(name) == "emulated":
            return f"{hardware.name} only emulates {name}"
    speed = hardware.find_speedup(formats[0])
    if speed is not None and speed <= 1.0:
        return f"{precision} is not faster than fp32 on {hardware.name} ({_describe_speed(formats[0], hardware)})"
    if speed is None and precision == "fp16" and hardware.kind == "cpu":
        # Most CPUs that list fp16 run it in scalar code; without a measurement that is a trap.
        return f"fp16 on a CPU is used only if it was measured, which it was not on {hardware.name}"
    return ""


def _grant_fastest(hardware: Hardware) -> Grant:
    here = [rung for rung in AUTO_RUNGS if not explain_lack(rung, hardware)]
    if hardware.kind == "cpu" and "bf16" not in here:
        reason = (
            f"{explain_lack('bf16', hardware)}; fp32 is the fastest here, and simulate gives the numerics of any format"
        )
        return Grant(asked="auto", precision="fp32", reason=reason)
    speeds = {rung: hardware.find_speedup(rung) for rung in here}
    known = {rung: speed for rung, speed in speeds.items() if speed is not None}
    if len(known) < len(here):
        best = here[0]  # not all speeds are known: the order of the ladder decides
    else:
        best = max(known, key=lambda rung: known[rung])
        if "bf16" in known and known[best] < TIE * known["bf16"]:
            best = "bf16"
    why_not_bf16 = "" if best == "bf16" else f"; not bf16: {explain_lack('bf16', hardware) or 'slower here'}"
    return Grant(asked="auto", precision=best, reason=_argue_for(best, hardware) + why_not_bf16)


def _step_down(asked: str, hardware: Hardware, missing: str, *, strict: bool) -> Grant:
    start = LADDER.index(asked.removesuffix("-true")) + 1
    granted = next(rung for rung in LADDER[start:] if not explain_lack(rung, hardware))
    if strict:
        raise make_strict_refusal(asked, granted, missing, fix=f"or auto, or simulate {asked} for its numerics")
    scaling = " with loss scaling" if granted == "fp16" else ""
    warning = f"{asked} requested, running {granted}{scaling}: {missing}"
    return Grant(asked=asked, precision=granted, reason=f"{missing}; {granted} is the next fallback", warning=warning)


def make_strict_refusal(asked: str, granted: str, missing: str, *, fix: str = "") -> HardwareError:
    """Return the error for a request that only a lower rung could serve while `strict` is on."""
    return HardwareError(
        f"{asked} was requested, but {missing}",
        why=f"strict is on, so halfstep does not fall back to {granted}",
        fix=", ".join(filter(None, (f"request {granted}, or leave strict off", fix))),
    )


def _grant_simulated(asked: str, hardware: Hardware) -> Grant:
    if asked == "auto":
        reason = f"numerics of bf16, auto's choice on a current GPU, simulated on {hardware.name}"
        return Grant(asked=asked, precision="bf16", reason=reason, simulated=True)
    reason = f"numerics of {asked}, simulated on {hardware.name}; eager only, and its speed means nothing"
    return Grant(asked=asked, precision=asked, reason=reason, simulated=True)


def _argue_for(precision: str, hardware: Hardware) -> str:
    tf32 = hardware.find_speedup("tf32")
    if precision == "fp32":
        reason = "strict fp32: TF32 off in matmul, convolution and RNN"
        if hardware.get_support("tf32") == "native" and tf32 is not None and tf32 > 1:
            reason += f"; tf32 would be {tf32:.1f}x as fast ({_name_origin('tf32', hardware)})"
        return reason
    speed = _describe_speed(PRECISION_FORMATS[precision][0], hardware)
    return f"native on {hardware.name}, {speed}" if speed else f"native on {hardware.name}, speed not measured"


def _describe_speed(format_name: str, hardware: Hardware) -> str:
    speed = hardware.find_speedup(format_name)
    if speed is None:
        return ""
    is_mean = {"matmul", "conv_nchw"} <= {m.op for m in hardware.measurements if m.format == format_name}
    over = " over matmul and convolution" if is_mean else ""
    return f"{_name_origin(format_name, hardware)} {format_speedup(speed)}x fp32{over}"


def _name_origin(format_name: str, hardware: Hardware) -> str:
    return "measured" if any(m.format == format_name for m in hardware.measurements) else "published"


# --- what one module gets: a row of the plan ---
# Here and not in plan.py, whose methods call the files that make and apply rows.

RowKind = Literal["default", "module", "frozen", "island"]

WHOLE_MODEL = "*"  # name of the one row a plan has for all modules when it was made without a model
ROOT = "(root)"  # name of the model itself, if it has parameters outside its submodules


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanRow:
    """One module: how its weights are stored, what it computes in, and why."""

    module: str
    storage: str
    compute: str
    reason: str
    kind: RowKind = "default"
    precision: str = ""  # what this module was granted; empty if the plan's own precision applies

    @property
    def is_part(self) -> bool:
        """True if a pattern of the request names the module, so that it is treated separately."""
        return self.kind in ("module", "frozen")
