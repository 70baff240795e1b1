"""Prove a step's guarantees by observation: a bad step changes nothing, clipping clips, rates follow the schedule."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path

from halfstep.step.batches import Batch, Window
from halfstep.step.step import GuardedStep, LossFn

NOT_STATE = ("attempted", "scaler")
"""Entries of a step's state that a dropped step changes: a dropped step is an attempt, and in fp16 it lowers the loss
scale."""
ROUNDING = 1e-3
"""Relative: a norm over fp32 gradients summed in another order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProofLine:
    """One line of a page of evidence; `holds` is None if it cannot be measured."""

    name: str
    holds: bool | None
    text: str

    @property
    def verdict(self) -> str:
        return "not measurable" if self.holds is None else "holds" if self.holds else "DOES NOT HOLD"


def check_nan_is_dropped(step: GuardedStep, loss_fn: LossFn, window: Window) -> tuple[bool, str]:
    """Check that a NaN injected into a step, in forward and in backward, leaves all state bit-identical."""
    before = _copy_state(step)
    facts = step.compute(_scale_loss(loss_fn, float("nan")), window)
    step.commit(facts)
    changed = _list_changes(before, _copy_state(step))
    reading = facts.read()
    if changed:
        return False, f"a step with a NaN changed {', '.join(changed[:3])}" + (" ..." if len(changed) > 3 else "")
    if not reading.is_bad:
        return False, "a step with a NaN loss was not found to be bad"
    return True, f"a step with a NaN was dropped; {len(before)} tensors stayed bit-equal"


def check_clipping(step: GuardedStep, loss_fn: LossFn, window: Window) -> tuple[bool | None, str]:
    """Check that gradients far above the limit are clipped to it. Nothing is committed."""
    limit, kind = step.clip.limit, step.clip.kind
    norm = _measure_norms(step, loss_fn, window)[0]
    if not math.isfinite(norm):
        return None, f"the step itself is bad: its {kind} norm is {norm:g}, and it is dropped whole"
    # Scale the loss so that the norm is ten times the limit; a step that is above that already is used as it is.
    wanted = 10 * limit / norm if norm > 0 else 1.0
    raised = max(wanted, 1.0)
    before, after = _measure_norms(step, _scale_loss(loss_fn, raised), window)
    text = f"{kind} norm {norm:.3g} here"
    if raised > 1:
        text += f"; with the loss times {raised:.3g}: {before:.3g}"
    return after <= limit * (1 + ROUNDING), f"{text}, {after:.3g} after clipping at {limit:g}"


def _measure_norms(step: GuardedStep, loss_fn: LossFn, window: Window) -> tuple[float, float]:
    """Return the gradient norm before and after clipping."""
    try:
        facts = step.compute(loss_fn, window)
        gradients = [p.grad for o in step.optimizers for g in o.param_groups for p in g["params"] if p.grad is not None]
        factor = 1.0 if facts.factor is None else float(facts.factor)
        if step.clip.kind == "value":
            largest = max(float(gradient.abs().max()) for gradient in gradients)
            return float(facts.grad_norm), largest * factor
        kind = float("inf") if step.clip.kind == "inf" else 2.0
        return float(facts.grad_norm), float(torch.nn.utils.get_total_norm(gradients, norm_type=kind)) * factor
    finally:
        step.abandon()


def check_rates(step: GuardedStep, loss_fn: LossFn, window: Window, *, num_steps: int = 3) -> tuple[bool | None, str]:
    """Check over a few steps that the rate each reports matches its schedule."""
    if step.rates is None:
        return None, "no schedule: the learning rate is the optimizer's own"
    found = []
    for _ in range(num_steps):
        wanted = compute_scheduled_rate(step, int(step.committed))
        facts = step.compute(loss_fn, window)
        step.commit(facts)
        found.append((facts.read().lr, wanted))
    wrong = [(ran, wanted) for ran, wanted in found if not is_same_rate(ran, wanted)]
    if wrong:
        return False, f"a step ran with {wrong[0][0]:.4g}, its schedule gives {wrong[0][1]:.4g}"
    return True, f"{num_steps} steps ran with {', '.join(f'{ran:.3g}' for ran, _ in found)}, as scheduled"


def compute_scheduled_rate(step: GuardedStep, committed: int) -> float:
    """Return the learning rate of the first group after this many committed steps: base rate × schedule × factor."""
    # The factor is the current one, also for earlier steps: it is not recorded when a plateau or a rollback lowers it.
    assert step.rates is not None
    return float(step.rates.base[0]) * step.rates.functions[0](committed) * float(step.rates.factor[0])


def is_same_rate(ran: float, wanted: float) -> bool:
    """True if rates are equal in fp32, like the table on the device."""
    return abs(ran - wanted) <= 1e-6 * max(abs(wanted), 1e-12)


def _scale_loss(loss_fn: LossFn, factor: float) -> LossFn:
    def scaled(batch: Batch) -> Any:
        found = loss_fn(batch)
        return (found[0] * factor, *found[1:]) if isinstance(found, tuple) else found * factor

    return scaled


def _copy_state(step: GuardedStep) -> dict[str, Tensor]:
    """Return copies of all tensors that a bad step must not change, by name."""
    own = {name: value for name, value in step.state_dict().items() if name not in NOT_STATE}
    found: dict[str, Tensor] = {}
    paths, _ = tree_flatten_with_path({"model": step.model.state_dict(), "step": own})
    for path, leaf in paths:
        value = leaf if isinstance(leaf, Tensor) else torch.tensor(leaf) if isinstance(leaf, int | float) else None
        # A group's `lr` is the rate of the newest attempt, read from the committed count, which is in here.
        if value is not None and not keystr(path).endswith("['lr']"):
            found[keystr(path)] = value.detach().clone()
    return found


def _list_changes(before: dict[str, Tensor], after: dict[str, Tensor]) -> list[str]:
    if before.keys() != after.keys():
        return sorted(before.keys() ^ after.keys())
    return [name for name in before if not torch.equal(_view_bits(before[name]), _view_bits(after[name]))]


def _view_bits(tensor: Tensor) -> Tensor:
    """View values as bits, because NaN differs from itself, and 0 equals -0."""
    return tensor.contiguous().view(-1).view(torch.uint8)
