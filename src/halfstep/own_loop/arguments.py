"""What people give `hs.Step`: brought into the form the step needs, or refused in words before anything is changed."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from numbers import Integral, Real
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import _disable_current_modes

from halfstep.errors import ConfigError, ModelError, PrecisionError, nearest
from halfstep.precision.apply import STORAGE_DTYPES
from halfstep.precision.plan import ROOT, Plan
from halfstep.step.batches import Batch, Weight, batch_length
from halfstep.step.forward_writes import refuse_uninitialised
from halfstep.step.guard import GuardOptions
from halfstep.step.places import Places
from halfstep.step.refusals import refuse_unfit_loss
from halfstep.step.scaler import ScalerOptions

BY_DTYPE = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def refuse_unknown(given: Mapping[str, object], function: Callable[..., None]) -> None:
    """Refuse keywords that hs.Step does not have."""
    names = [name for name, one in inspect.signature(function).parameters.items() if one.kind is one.KEYWORD_ONLY]
    for name in given:
        raise ConfigError(f"hs.Step has no argument {name!r}", fix=nearest(name, ["precision", *names]))


def precision_of(given: object) -> str:
    """The name of a precision; torch's dtypes are names, too."""
    if isinstance(given, torch.dtype) and given in BY_DTYPE:
        return BY_DTYPE[given]
    if isinstance(given, str):
        return given
    raise PrecisionError(f"precision is {given!r}", fix="'auto', 'bf16', 'fp16', 'tf32' or 'fp32' (no mixed precision)")


def model_and_optimizers(model: object, given: object) -> tuple[nn.Module, list[Optimizer]]:
    several = list(given) if isinstance(given, Iterable) else [given]
    optimizers = [one for one in several if isinstance(one, Optimizer)]
    if isinstance(model, nn.Module) and optimizers and len(optimizers) == len(several):
        return model, optimizers
    fix = "hs.Step(model, torch.optim.AdamW(model.parameters()))"
    if isinstance(model, (list, tuple)):
        fix = "several modules in one: hs.Step(torch.nn.ModuleList([a, b]), optimizer)"
    elif isinstance(model, Tensor):
        fix = (
            "a tensor that is trained itself: model = torch.nn.ParameterList([x]), with an optimizer of its parameters"
        )
    elif not isinstance(model, nn.Module) and isinstance(inner := getattr(model, "model", None), nn.Module):
        fix = f"a trainer has a loop of its own: give hs.Step its {type(inner).__name__}, and write the loop"
    elif isinstance(getattr(given, "optimizer", None), Optimizer):
        fix = f"the optimizer in the {type(given).__name__}: hs.Step(model, optimizer.optimizer, schedule=...), where "
        fix += "schedule= takes over the learning rates of the wrapper, which is not stepped"
    raise ConfigError(
        f"a step takes a model and its optimizer, or a list of them, not "
        f"({type(model).__name__}, {type(given).__name__})",
        fix=fix,
    )


def device_of(model: nn.Module) -> torch.device:
    refuse_uninitialised(Places([model]))
    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        raise ModelError(
            f"weights of {type(model).__name__} are on the meta device, where nothing is stored",
            fix="model.to_empty(device=...) and load or initialise its weights first",
        )
    for weight in model.parameters():
        return weight.device
    raise ModelError(f"{type(model).__name__} has no parameters", fix="give the model that is trained")


def number(name: str, value: object, *, below: float = math.inf) -> float:
    """A number from 0 up; None means 0, which turns the thing off."""
    if value is None:
        return 0.0
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= float(value) < below:
        limit = f" and below {below:g}" if below < math.inf else ""
        raise ConfigError(f"{name}={value!r} is not a number from 0 up{limit}", fix=f"{name}=0 turns it off")
    return float(value)


def count(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
        raise ConfigError(f"{name}={value!r} is not a count from 1 up", fix=f"{name}=1 is plain training")
    return int(value)


def refuse_uncallable(**hooks: object) -> None:
    for name, hook in hooks.items():
        if hook is not None and not callable(hook):
            takes = "the Outcome of a step" if name == "on_outcome" else "the model"
            raise ConfigError(f"{name}={hook!r} cannot be called", fix=f"a function that takes {takes}, or None")


def folder_of(capsules: object) -> str | os.PathLike[str] | None:
    if capsules is None or isinstance(capsules, (str, os.PathLike)):
        return capsules or None
    raise ConfigError(f"capsules={capsules!r} is not a folder", fix='capsules="DIR"')


def parts_of(modules: object) -> Mapping[str, str] | None:
    if modules is None or isinstance(modules, Mapping):
        return modules
    raise ConfigError(
        f"modules= is a {type(modules).__name__}",
        why="it says the precision of each part",
        fix='modules={"head": "fp32"}',
    )


def guard_options(given: GuardOptions | Mapping[str, object] | None) -> GuardOptions:
    return given if isinstance(given, GuardOptions) else GuardOptions(**_named("guard", given, GuardOptions))


def scaler_options(given: torch.amp.GradScaler | Mapping[str, object] | None) -> ScalerOptions:
    """Of a GradScaler its settings, and the scale it has by now: that of a checkpoint, if one was loaded into it."""
    if isinstance(given, torch.amp.GradScaler):
        given = {
            "init_scale": given.get_scale(), "growth_factor": given.get_growth_factor(),
            "backoff_factor": given.get_backoff_factor(), "growth_interval": given.get_growth_interval(),
        } if given.is_enabled() else {}  # fmt: skip
    return ScalerOptions(**_named("scaler", given, ScalerOptions))


def _named(argument: str, given: object, kind: type) -> dict[str, Any]:
    known = [field.name for field in dataclasses.fields(kind)]
    if not isinstance(given, Mapping | None):
        fix = f"{argument}={{...}} with any of {', '.join(known)}"
        raise ConfigError(f"{argument}={given!r} is not a dict", fix=fix)
    for name in given or ():
        if name not in known:
            raise ConfigError(f"{argument} has no {name!r}", fix=nearest(str(name), known))
    return dict(given or {})


def refuse_strangers(model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Each optimizer must hold some weight of the model; besides those it may hold others, such as a loss's own."""
    own = {id(weight) for weight in model.parameters()}
    for optimizer in optimizers:
        held = [weight for group in optimizer.param_groups for weight in group["params"]]
        if held and not any(id(weight) in own for weight in held):
            raise ConfigError(
                f"none of the {len(held)} parameters of {type(optimizer).__name__} belongs to this "
                f"{type(model).__name__}",
                why="it was made for another model, or before the weights were replaced, as by model.to(...) or a copy",
                fix=f"make it again: {type(optimizer).__name__}(model.parameters(), ...); if it is that of a loss "
                "function, give both: hs.Step(torch.nn.ModuleList([model, criterion]), [optimizer, its_optimizer])",
            )


def refuse_odd_settings(optimizers: Sequence[Optimizer]) -> None:
    """Numbers that somebody wrote into the groups; those on a device are not asked for."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for name in ("lr", "weight_decay"):
                value = group.get(name, 0.0)
                if isinstance(value, Real) and not math.isfinite(value):
                    raise ConfigError(
                        f"{name} of {type(optimizer).__name__} is {value}",
                        why="it was written into param_groups, and a step with it would ruin every weight of the group",
                        fix=f'optimizer.param_groups[...]["{name}"] = a finite number',
                    )


def refuse_recast(model: nn.Module, plan: Plan) -> None:
    """The optimizer exists already: weights stay as they are stored, or the request is refused."""
    rows = {row.module.replace(ROOT, ""): row for row in plan.rows if row.kind != "island"}
    for name, weight in model.named_parameters():
        row = rows.get(name.rpartition(".")[0])
        if row is None or not weight.requires_grad or not weight.is_floating_point():
            continue
        wanted = STORAGE_DTYPES[row.storage]
        # bf16-true would keep norms in fp32, but a model cast as a whole is as good.
        if weight.dtype not in (wanted, torch.bfloat16 if plan.granted == "bf16-true" else wanted):
            stored = str(weight.dtype).removeprefix("torch.")
            cast = "bfloat16()" if wanted is torch.bfloat16 else "float()"
            raise PrecisionError(
                f"{name} is stored in {stored}, precision {plan.granted!r} stores it in {row.storage}",
                why="the optimizer was made for the weights as they are, and they are not recast behind its back",
                fix=f"call model.{cast} before making the optimizer"
                + (", or choose another precision" if weight.dtype != torch.float64 else ": no precision here is fp64"),
            )


# --- the window, and what loss_fn gives back ---


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
                fix="return loss; keep what else you need in a variable",
            )
        refuse_unfit_loss(result[0])
        return result[0], _weight(result[1])
    refuse_unfit_loss(result)
    return result, _length(batch, is_alone=is_alone)


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
        fix="return the loss alone, the sum if there are several, and keep results in a variable of your own; a "
        "fractional weight: torch.tensor(w)",
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
    return any(value >= 1024 and value.is_integer() and int(value).bit_count() == 1 for value in _numbers_in(loss))


def is_divided_by(number: int, loss: Tensor) -> bool:
    """Whether the last thing done to a loss was to divide it by this number, as loops that accumulate by hand do."""
    return loss.grad_fn is not None and loss.grad_fn.name() == "DivBackward0" and number in _numbers_in(loss)


def _numbers_in(loss: Tensor) -> list[float]:
    """The plain numbers in the last operation; none where two losses meet in it."""
    assert loss.grad_fn is not None
    inputs = [following for following, _ in loss.grad_fn.next_functions]
    if len(inputs) > 1 and None not in inputs:
        return []
    given = (getattr(loss.grad_fn, f"_saved_{side}", None) for side in ("self", "other"))
    # Without simulation's mode: torch hands it a plain number in place of the tensor that autograd made of one.
    with _disable_current_modes():
        return [float(n) for n in given if isinstance(n, Tensor) and n.numel() == 1 and not n.requires_grad]
