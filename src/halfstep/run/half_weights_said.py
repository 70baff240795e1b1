"""What a run says of weights that are stored in bf16: how they are rounded, and what was lost by it."""

from __future__ import annotations

from collections.abc import Iterable

from torch.optim import Optimizer

from halfstep.errors import counted
from halfstep.step.adamw_bf16 import HalfWeights
from halfstep.step.half_weights import is_kept_in_half

LOSES = "updates below half of bf16's spacing (0.4 % of a weight) are lost, every time they come"
WITHOUT_LOW = (
    "the run was stored without the low halves of its bf16 weights: it goes on as it was, rounded to nearest; " + LOSES
)


def rounding_warnings(optimizers: Iterable[Optimizer]) -> list[str]:
    """Where weights in bf16 are rounded to nearest: on request, or because only our AdamW can do better."""
    found = []
    for optimizer in optimizers:
        half = [p for group in optimizer.param_groups for p in group["params"] if is_kept_in_half(p)]
        if half and not isinstance(optimizer, HalfWeights):
            name = type(optimizer).__name__
            found.append(
                f"{name} rounds {counted(len(half), 'parameter')} in bf16 to nearest: {LOSES}; "
                "optimizer.name=adamw keeps the bits that bf16 drops, precision=bf16 keeps fp32 weights"
            )
        elif half and isinstance(optimizer, HalfWeights) and optimizer.rounding == "nearest":
            found.append(f"precision.rounding=nearest: {LOSES}; the summary counts them")
    return found


def resumed_without_low(optimizers: Iterable[Optimizer]) -> list[str]:
    ours = (optimizer for optimizer in optimizers if isinstance(optimizer, HalfWeights))
    return [WITHOUT_LOW] if any(optimizer.was_stored_without_low for optimizer in ours) else []


def lost_updates(optimizers: Iterable[Optimizer]) -> list[tuple[str, str]]:
    """A row of the summary for each optimizer that counted; waits for the device."""
    shares = (o.lost_share() for o in optimizers if isinstance(o, HalfWeights))
    return [("lost updates", f"{share:.1%} of all, rounded away") for share in shares if share is not None]
