"""What a user's loop hands to each step: the window, and what `loss_fn` gives back. Right, or refused in words."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from halfstep.errors import ConfigError
from halfstep.step.batches import Batch, batch_length
from halfstep.step.step import Weight


def loader_of(batches: Any) -> Iterator[Batch]:
    """What `windows` goes through: anything that gives batches, but not a batch."""
    is_iterable = hasattr(batches, "__iter__") or hasattr(batches, "__getitem__")
    if isinstance(batches, (Tensor, np.ndarray, Mapping, str)) or not is_iterable:
        raise ConfigError(
            f"windows takes a loader, something that gives batches, not a {type(batches).__name__}",
            fix="for window in step.windows(loader): step(loss_fn, window); one batch: step(loss_fn, [batch])",
        )
    found: Iterator[Batch] = iter(batches)
    return found


def refuse_no_function(loss_fn: object) -> None:
    if not callable(loss_fn):
        raise ConfigError(
            f"loss_fn is a {type(loss_fn).__name__}, not a function",
            why="the step calls it with each batch of the window",
            fix="step(loss_fn, window), in this order, with loss_fn(batch) -> loss",
        )


def window_of(given: object, accumulate: int) -> list[Batch]:
    """The batches of one step: at most `accumulate`, as a list, a tuple or an iterator over them."""
    if isinstance(given, Iterator):
        window = list(itertools.islice(given, accumulate + 1))  # it may never end
        if len(window) > accumulate:
            _refuse(f"gives more than the accumulate={accumulate} batches of one step")
    else:
        is_record = hasattr(given, "_fields")
        if isinstance(given, (str, bytes)) or is_record or not isinstance(given, Sequence):
            _refuse(f"is a {type(given).__name__}, not a list of batches")
        if len(given) > accumulate:
            _refuse(f"holds {len(given)} entries, more than the accumulate={accumulate} batches of one step")
        window = list(given)
    if _mixes_kinds(window):
        _refuse("holds tensors of different kinds, as the parts of one batch are")
    if isinstance(given, tuple) and len(window) > 1 and all(isinstance(batch, Tensor) for batch in window):
        _refuse(f"is a tuple of {len(window)} tensors, as a batch is; batches that are tensors come in a list")
    return window


def _mixes_kinds(window: Sequence[Batch]) -> bool:
    kinds = {(batch.dtype, batch.ndim) if isinstance(batch, Tensor) else type(batch) for batch in window}
    return len(kinds) > 1 and any(isinstance(batch, Tensor) for batch in window)


def _refuse(found: str) -> NoReturn:
    raise ConfigError(
        f"the window {found}",
        why="a step takes a window, a list of at most `accumulate` batches; a batch in its place would be taken apart",
        fix="loop over step.windows(loader), or give one batch as step(loss_fn, [batch])",
    )


def loss_and_weight(result: Any, batch: Batch, *, is_alone: bool) -> tuple[Tensor, Weight]:
    """The loss of one batch and how much it counts in its window."""
    if isinstance(result, tuple) and not hasattr(result, "_fields"):
        if len(result) != 2:
            raise ConfigError(
                f"loss_fn gave {len(result)} values",
                why="it gives the loss, or (loss, weight)",
                fix="return loss; keep what else you need in a variable of your own",
            )
        return _loss(result[0]), _weight(result[1])
    return _loss(result), _length(batch, is_alone=is_alone)


def _loss(loss: Any) -> Tensor:
    if not isinstance(loss, Tensor):
        found = "None" if loss is None else f"a {type(loss).__name__}"
        also = "; of a model's output: return output.loss" if hasattr(loss, "loss") else ""
        raise ConfigError(
            f"loss_fn gave {found}, not a tensor",
            why="the gradient is taken of what it returns",
            fix=f"return loss, or (loss, weight), from loss_fn; without .item() or float(){also}",
        )
    if loss.numel() != 1:
        raise ConfigError(
            f"the loss has the shape {tuple(loss.shape)}",
            why="a gradient is taken of one number; of a tuple the loss comes first: (loss, weight)",
            fix="return one number: loss.mean() or loss.sum()",
        )
    if not loss.requires_grad:
        raise ConfigError(
            "the loss of loss_fn depends on no weight that is trained",
            why="it was detached, computed under torch.no_grad(), or by a model whose weights are all frozen",
            fix="compute it with the model given to Step, without .detach() and no_grad()",
        )
    return loss


def _weight(weight: Any) -> Weight:
    """A count of samples or tokens. What looks like a result, a model's output or an accuracy, is not a weight."""
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
        f"loss_fn gave (loss, {shown}), but the second value is the weight of the batch",
        why="a weight is the number of samples or tokens that the loss is the mean of; 0 drops the batch",
        fix="return loss alone and keep results in a variable of your own; a fractional weight: torch.tensor(w)",
    )


def _length(batch: Batch, *, is_alone: bool) -> int:
    tensor = next(_arrays_in(batch), None)
    if tensor is not None and tensor.ndim:
        return len(tensor)
    return 1 if is_alone else batch_length(batch)  # alone it counts whatever it weighs


def _arrays_in(batch: Batch) -> Iterator[Any]:
    if isinstance(batch, (Tensor, np.ndarray)):
        yield batch
    elif isinstance(batch, (Mapping, list, tuple)):
        for part in batch.values() if isinstance(batch, Mapping) else batch:
            yield from _arrays_in(part)


def half_dtypes_in(loss: Tensor, most: int = 20_000) -> set[torch.dtype]:
    """The half formats that autograd's graph of a loss went through, in its last `most` operations."""
    found: set[torch.dtype] = set()
    seen: set[Any] = set()
    open_nodes = [loss.grad_fn]
    while open_nodes and len(seen) < most:
        node = open_nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        dtypes = {entry.dtype for entry in getattr(node, "_input_metadata", ()) if entry is not None}
        found |= dtypes & {torch.float16, torch.bfloat16}
        open_nodes += [following for following, _ in node.next_functions]
    return found


def is_scaled_by_hand(loss: Tensor) -> bool:
    """Whether the last thing done to a loss was to multiply it by a large power of two, as GradScaler.scale does."""
    if loss.grad_fn is None or loss.grad_fn.name() != "MulBackward0":
        return False
    if all(following is not None for following, _ in loss.grad_fn.next_functions):
        return False  # two losses multiplied
    factors = (getattr(loss.grad_fn, f"_saved_{side}", None) for side in ("self", "other"))
    # Without simulation's mode: torch hands it a plain number in place of the tensor that autograd made of one.
    with _disable_current_modes():
        values = [float(f) for f in factors if isinstance(f, Tensor) and f.numel() == 1 and not f.requires_grad]
    return any(value >= 1024 and value.is_integer() and int(value).bit_count() == 1 for value in values)
