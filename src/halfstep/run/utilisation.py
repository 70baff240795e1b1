"""Model FLOPs utilisation (Chowdhery et al. 2022): a model's own operations over what the device could do at its peak.

The peak is the vendor's, dense and with fp32 accumulation, in the format that matmuls compute in. Operations that are
run twice to save memory count once, so recomputing lowers it.
"""

from __future__ import annotations

from halfstep.hardware.gpus import find_known
from halfstep.precision.plan import Plan
from halfstep.workloads.kind import Unit

PUBLISHED_AS = {"fp8": "fp8_e4m3"}


def peak_flops(plan: Plan) -> float | None:
    """Of the plan's device in its format; None where no public document says it."""
    known = find_known(plan.device_name) if plan.device.startswith("cuda") else None
    tflops = known.tflops.get(PUBLISHED_AS.get(plan.compute, plan.compute)) if known is not None else None
    return tflops * 1e12 if tflops else None


def utilisation(unit: Unit, samples_per_s: float, peak: float | None) -> float | None:
    return samples_per_s * unit.flops_per_sample / peak if peak and unit.flops_per_sample else None
