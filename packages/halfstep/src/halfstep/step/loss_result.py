"""Read what a user's loss function returns: the loss, or loss and weight."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from halfstep.errors import ConfigError
from halfstep.step.batches import Batch, Weight, count_samples, find_first_array
from halfstep.step.refusals import refuse_unfit_loss


def split_result(result: Any, batch: Batch, *, is_alone: bool) -> tuple[Tensor, Weight]:
    """Return the loss of one batch and its weight in the window."""
    if isinstance(result, tuple) and not hasattr(result, "_fields"):
        if len(result) != 2:
            raise ConfigError(
                f"loss_fn returned {len(result)} values",
                why="it must return the loss, or (loss, weight)",
                fix="return the loss alone; keep other values in a variable",
            )
        refuse_unfit_loss(result[0])
        return result[0], _check_weight(result[1])
    refuse_unfit_loss(result)
    array = find_first_array(batch)
    has_rows = array is not None and array.ndim
    return result, 1 if is_alone and not has_rows else count_samples(batch)  # alone in its window any weight will do


def _check_weight(weight: Any) -> Weight:
    """Return a weight, a count of samples or tokens. Refuse what looks like a result: a model output or an accuracy."""
    if isinstance(weight, Tensor) and weight.numel() == 1 and not weight.requires_grad:
        return weight.detach().reshape(())
    is_number = isinstance(weight, (int, float, np.number)) and not isinstance(weight, bool)
    is_fraction = isinstance(weight, (float, np.floating)) and not (weight >= 1 and float(weight).is_integer())
    if is_number and weight >= 0 and not is_fraction:
        return float(weight) if isinstance(weight, (float, np.floating)) else int(weight)
    shown = f"{weight!r}" if is_number else f"a {type(weight).__name__}"
    if isinstance(weight, Tensor):
        shown = f"a tensor of shape {tuple(weight.shape)}" + (" with a gradient" if weight.requires_grad else "")
    raise ConfigError(
        f"loss_fn returned (loss, {shown}), but the second value is the weight of the batch",
        why="a weight is the number of samples or tokens over which the loss is averaged; 0 drops the batch",
        fix="return the loss alone (the sum of several) and keep other results in a variable; "
        "give a fractional weight as torch.tensor(w)",
    )
