"""What people give `hs.Step`: brought into the form the step needs, or refused in words before anything is changed."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral, Real

import torch
from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.optim import Optimizer

from halfstep.errors import ConfigError, ModelError, PrecisionError, nearest
from halfstep.precision.apply import STORAGE_DTYPES
from halfstep.precision.plan import ROOT, Plan
from halfstep.step.guard import GuardOptions

BY_DTYPE = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


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
    raise ConfigError(
        f"a step takes a model and its optimizer, or a list of them, not "
        f"({type(model).__name__}, {type(given).__name__})",
        fix=fix,
    )


def device_of(model: nn.Module) -> torch.device:
    """Where the model is trained."""
    tensors = [*model.parameters(), *model.buffers()]
    if any(isinstance(tensor, (UninitializedParameter, UninitializedBuffer)) for tensor in tensors):
        raise ModelError(
            f"{type(model).__name__} has lazy layers without shapes yet",
            fix="run one batch through the model, then make the optimizer and the step",
        )
    if any(tensor.is_meta for tensor in tensors):
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


def guard_options(given: GuardOptions | Mapping[str, object] | None) -> GuardOptions:
    if given is None or isinstance(given, GuardOptions):
        return given or GuardOptions()
    known = [field.name for field in dataclasses.fields(GuardOptions)]
    if not isinstance(given, Mapping):
        raise ConfigError(f"guard={given!r} is not a dict", fix=f"guard={{...}} with any of {', '.join(known)}")
    for name in given:
        if name not in known:
            raise ConfigError(f"guard has no {name!r}", fix=nearest(str(name), known))
    return GuardOptions(**given)  # type: ignore[arg-type]


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
                fix=f"make it again: {type(optimizer).__name__}(model.parameters(), ...)",
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
                fix=f"call model.{cast} before making the optimizer, or choose another precision",
            )
