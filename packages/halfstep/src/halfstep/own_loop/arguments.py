"""Validate and normalise the arguments of hs.Step before anything is changed."""

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

from halfstep.distributed.sharding import find_sharding
from halfstep.errors import ConfigError, ModelError, PrecisionError, suggest_nearest
from halfstep.fast.fast_path import Fast
from halfstep.own_loop.repeated_blocks import describe_recomputed, find_blocks, recompute_blocks_
from halfstep.precision.apply import STORAGE_DTYPES
from halfstep.precision.decide import Precision
from halfstep.precision.names import normalise_precision
from halfstep.precision.plan import ROOT, Plan
from halfstep.recompute import Recomputing
from halfstep.step.batches import Batch
from halfstep.step.forward_writes import TensorSlots, refuse_uninitialised
from halfstep.step.guard import GuardOptions
from halfstep.step.optim.by_name import OPTIMIZERS
from halfstep.step.optim.cycled_adam import takes_tensor_betas
from halfstep.step.scaler import ScalerOptions
from halfstep.step.tables import Rates
from halfstep.step.user_warnings import warn_user

OTHER_NAMES = {
    **dict.fromkeys(("dtype", "amp", "amp_dtype", "mixed_precision", "autocast"), 'precision="bf16"'),
    **dict.fromkeys(("compile", "graph", "cuda_graph", "mode"), 'fast="compile" or fast="graph"'),
    **dict.fromkeys(("scheduler", "lr_scheduler"), "schedule=hs.per_step(scheduler)"),
    **dict.fromkeys(("clip", "clip_grad", "clip_grad_norm", "clipping"), "clip_norm=1.0"),
    **dict.fromkeys(("max_norm", "max_grad_norm", "grad_clip", "gradient_clip_val"), "clip_norm=1.0"),
    **dict.fromkeys(("accumulation_steps", "gradient_accumulation_steps", "grad_accum"), "accumulate=4"),
    **dict.fromkeys(("checkpointing", "gradient_checkpointing"), 'memory="low"'),
    **dict.fromkeys(("ema", "ema_rate"), "ema_decay=0.999"),
    **dict.fromkeys(("num_steps", "total_steps"), "fast=hs.Fast(num_steps=100_000)"),
    "max_graphs": "fast=hs.Fast(max_graphs=8)",
    "pure_ops": 'fast=hs.Fast(pure_ops=["my_library::my_operator"])',
    "modules": 'precision=hs.Precision("bf16", modules={"head": "fp32"})',
    "fp8_recipe": 'precision=hs.Precision("fp8", fp8_recipe="rowwise")',
    **{name: f'precision=hs.Precision("bf16", {name}=True)' for name in ("strict", "simulate", "force")},
}
"""What arguments of torch and of trainers, and those of hs.Precision and hs.Fast, are called here."""


def refuse_unknown(given: Mapping[str, object], function: Callable[..., None]) -> None:
    """Refuse keywords that hs.Step does not have."""
    names = [name for name, one in inspect.signature(function).parameters.items() if one.kind is one.KEYWORD_ONLY]
    for name in given:
        if name not in names:
            fix = OTHER_NAMES.get(name) or suggest_nearest(name, ["precision", *names], count=1)
            raise ConfigError(f"hs.Step has no argument {name!r}", fix=fix)


def read_precision(given: object) -> Precision:
    """Return a precision that may be given as its name or as a torch dtype."""
    if isinstance(given, (str, torch.dtype)):
        return Precision(normalise_precision(given))
    if isinstance(given, Precision):
        return dataclasses.replace(given, default=read_precision(given.default).default)
    raise PrecisionError(
        f"unknown precision {given!r}", fix="use 'auto', 'bf16', 'fp16', 'tf32' or 'fp32' (no mixed precision)"
    )


def check_model_and_optimizers(model: object, given: object) -> tuple[nn.Module, list[Optimizer]]:
    several = list(given) if isinstance(given, Iterable) else [given]
    optimizers = [one for one in several if isinstance(one, Optimizer)]
    if isinstance(model, nn.Module) and optimizers and len(optimizers) == len(several):
        return model, optimizers
    found = f"({type(model).__name__}, {type(given).__name__})" if given != () else f"{type(model).__name__} alone"
    raise ConfigError(
        f"a step takes a model and its optimizer, or a list of optimizers, not {found}",
        why="it steps the optimizer itself, after checking that the step is good",
        fix="hs.Step(model, torch.optim.AdamW(model.parameters())): several modules as torch.nn.ModuleList([a, b]), a "
        "tensor as torch.nn.ParameterList([x]); for a trainer or a wrapper, the model and the optimizer inside it",
    )


def find_device(model: nn.Module) -> torch.device:
    refuse_uninitialised(TensorSlots([model]))
    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        raise ModelError(
            f"weights of {type(model).__name__} are on the meta device, where nothing is stored",
            fix="first call model.to_empty(device=...), and load or initialise its weights",
        )
    for weight in model.parameters():
        return weight.device
    raise ModelError(f"{type(model).__name__} has no parameters", fix="pass the model that is trained")


def check_number(name: str, value: object, *, below: float = math.inf) -> float:
    """Return a number from 0 up; None means 0, which turns the feature off."""
    if value is None:
        return 0.0
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= float(value) < below:
        limit = f" and below {below:g}" if below < math.inf else ""
        raise ConfigError(f"{name}={value!r} is not a number of at least 0{limit}", fix=f"{name}=0 turns it off")
    return float(value)


def check_count(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
        raise ConfigError(f"{name}={value!r} is not an integer of at least 1", fix=f"{name}=1 or more, or leave it out")
    return int(value)


def check_choice(name: str, value: object, choices: Sequence[str]) -> str:
    if isinstance(value, str) and value in choices:
        return value
    fix = suggest_nearest(str(value), choices, count=1)
    raise ConfigError(f"{name}={value!r} is not one of {', '.join(map(repr, choices))}", fix=fix)


def make_capturable(optimizers: Sequence[Optimizer], rates: Rates | None = None) -> list[str]:
    """Give torch's optimizers the form that a CUDA graph can hold: SGD's fused kernel, and counters on the device.
    Fused Adam takes its betas from the host, so it is not fused where a schedule cycles them.

    Return the names of those whose last bits may differ: bias corrections, and the product of learning rate and
    update, are rounded differently (docs/captured_steps.md)."""
    changed = []
    for optimizer in optimizers:
        groups = optimizer.param_groups
        on_gpu = all(p.is_cuda and p.is_floating_point() for group in groups for p in group["params"])
        if rates is not None and rates.cycles(optimizer):
            if not takes_tensor_betas(optimizer) or not on_gpu:
                continue  # its commit is not captured
            for group in groups:
                group["fused"] = False
        is_sgd = type(optimizer) is torch.optim.SGD and not any(g["foreach"] or g["differentiable"] for g in groups)
        can_be = type(optimizer) in OPTIMIZERS.values() and all("capturable" in group for group in groups)
        if not (can_be or is_sgd) or not on_gpu or any(group.get("fused") for group in groups):
            continue
        form = "fused" if is_sgd else "capturable"
        if type(optimizer) is not torch.optim.Rprop and not all(group[form] for group in groups):
            changed.append(type(optimizer).__name__)
        for group in groups:
            group[form] = True
        for parameter, own in optimizer.state.items():
            if isinstance(own.get("step"), Tensor):
                own["step"] = own["step"].to(parameter.device, torch.float32)
    return changed


def recompute_repeated_blocks(model: nn.Module) -> None:
    """Recompute the repeated blocks of a model in backward, instead of keeping their activations."""
    names = find_blocks(model)
    recompute_blocks_(model, "blocks", names)
    if not describe_recomputed(model) and not any(isinstance(module, Recomputing) for module in model.modules()):
        warn_user(f'memory="low" found no repeated blocks in {type(model).__name__}: nothing is recomputed')


def refuse_uncallable(**hooks: object) -> None:
    for name, hook in hooks.items():
        if hook is not None and not callable(hook):
            takes = "the Outcome of a step" if name == "on_outcome" else "the model"
            raise ConfigError(f"{name}={hook!r} is not callable", fix=f"pass a function that takes {takes}, or None")


def check_folder(capsules: object) -> str | os.PathLike[str] | None:
    if capsules is None or isinstance(capsules, (str, os.PathLike)):
        return capsules or None
    raise ConfigError(f"capsules={capsules!r} is not a folder", fix='capsules="DIR"')


def read_fast(given: object) -> Fast:
    """Return how steps are captured, which may be given as the mode."""
    fast = given if isinstance(given, Fast) else Fast(given)  # type: ignore[arg-type]
    check_choice("fast", fast.mode, ("auto", "graph", "compile", "off"))
    if fast.num_steps is not None:
        check_count("num_steps", fast.num_steps)
    check_count("max_graphs", fast.max_graphs)
    pure = [] if isinstance(fast.pure_ops, str) else list(fast.pure_ops)
    if isinstance(fast.pure_ops, str) or not all(isinstance(name, str) for name in pure):
        raise ConfigError(f"pure_ops={fast.pure_ops!r} is not a list of names", fix='pure_ops=["my_library::my_op"]')
    return dataclasses.replace(fast, pure_ops=frozenset(pure))


def make_guard_options(given: GuardOptions | Mapping[str, object] | None) -> GuardOptions:
    return given if isinstance(given, GuardOptions) else GuardOptions(**_check_names("guard", given, GuardOptions))


def make_scaler_options(given: torch.amp.GradScaler | Mapping[str, object] | None) -> ScalerOptions:
    """Return the scaler settings; of a GradScaler also its current scale, which may come from a checkpoint."""
    if isinstance(given, torch.amp.GradScaler):
        given = {
            "init_scale": given.get_scale(), "growth_factor": given.get_growth_factor(),
            "backoff_factor": given.get_backoff_factor(), "growth_interval": given.get_growth_interval(),
        } if given.is_enabled() else {}  # fmt: skip
    return ScalerOptions(**_check_names("scaler", given, ScalerOptions))


def warn_of_idle_scaler(given: torch.amp.GradScaler | Mapping[str, object] | None, plan: Plan) -> None:
    """Warn of a GradScaler in a precision that needs none."""
    if isinstance(given, torch.amp.GradScaler) and given.is_enabled() and not plan.needs_loss_scaling:
        # bf16 needs none either where it falls back to fp32; fp16 would.
        name = plan.granted if plan.asked in ("auto", "fp16") else plan.asked
        warn_user(f"{name} needs no scaler, so scaler=GradScaler(...) is not used: leave it out")


def _check_names(argument: str, given: object, kind: type) -> dict[str, Any]:
    known = [field.name for field in dataclasses.fields(kind)]
    if not isinstance(given, Mapping | None):
        fix = f"{argument}={{...}} with any of {', '.join(known)}"
        raise ConfigError(f"{argument}={given!r} is not a dict", fix=fix)
    for name in given or ():
        if name not in known:
            raise ConfigError(f"{argument} has no {name!r}", fix=suggest_nearest(str(name), known))
    return dict(given or {})


def refuse_unrelated_optimizers(model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Refuse an optimizer that trains no weight of the model. It may train others, too, such as a loss function's."""
    own = {id(weight) for weight in model.parameters()}
    for optimizer in optimizers:
        held = [weight for group in optimizer.param_groups for weight in group["params"]]
        if held and not any(id(weight) in own for weight in held):
            raise ConfigError(
                f"{type(optimizer).__name__} trains no parameter of this {type(model).__name__}",
                why="it was created for another model, or before model.to(...), a copy or fully_shard replaced weights",
                fix=f"create it again: {type(optimizer).__name__}(model.parameters(), ...); if it trains a loss "
                "function, pass both: hs.Step(torch.nn.ModuleList([model, criterion]), [optimizer, its_optimizer])",
            )


def refuse_non_finite_settings(optimizers: Sequence[Optimizer]) -> None:
    """Refuse a NaN or infinite lr or weight_decay. Tensors are not read: that would wait for the device."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for name in ("lr", "weight_decay"):
                value = group.get(name, 0.0)
                if isinstance(value, (float, int, np.number)) and not math.isfinite(value):
                    raise ConfigError(
                        f"{name} of {type(optimizer).__name__} is {value}",
                        why="it was set in param_groups, and one step with it would destroy the group's weights",
                        fix=f'optimizer.param_groups[...]["{name}"] = a finite number',
                    )


def refuse_recast(model: nn.Module, plan: Plan) -> None:
    """Refuse a precision that stores weights in another dtype: the optimizer already exists, so they are not recast."""
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
            other = ": there is no fp64 precision" if stored == "float64" else ", or choose another precision"
            raise PrecisionError(
                f"{name} is stored in {stored}, but precision {plan.granted!r} stores it in {row.storage}",
                why="the optimizer already refers to these weights, so they cannot be cast now",
                fix=f"call model.{cast} before creating the optimizer, and before fully_shard{other}",
            )


# --- a model sharded by fully_shard ---


def check_sharded(model: nn.Module, plan: Plan, *, capsules: object, has_fp8: bool) -> dict[str, object]:
    """Refuse settings that do not work with a sharded model. Return those that ranks must agree on."""
    sharding = find_sharding(model)
    if sharding is None:
        return {}
    if capsules:
        raise ConfigError(
            f"capsules={capsules!r} cannot be used with a sharded model",
            why="a capsule contains whole weights, and no rank has them",
            fix="leave capsules= out; to look for the cause of a bad step, run a smaller model without fully_shard",
        )
    if has_fp8 or any(row.compute == "fp8" for row in plan.rows):
        raise PrecisionError(
            "precision 'fp8' does not support a sharded model",
            why="fp8 pays off in compiled steps only, and a sharded step is not captured",
            fix="precision='bf16'",
        )
    modules: Sequence[Any] = sharding.modules
    policies = list(dict.fromkeys(module._get_fsdp_state()._mp_policy for module in modules))
    for policy in policies:
        if torch.float16 in (policy.param_dtype, policy.reduce_dtype) and not plan.needs_loss_scaling:
            raise PrecisionError(
                f"the model is sharded with {policy}, but precision is {plan.granted!r}",
                why="fp16 gradients vanish without loss scaling",
                fix='precision="fp16", or fully_shard(..., mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, '
                "reduce_dtype=torch.float32))",
            )
        summed_in = policy.reduce_dtype or policy.param_dtype or next(model.parameters()).dtype
        if summed_in == torch.bfloat16:
            warn_user("FSDP sums gradients over the ranks in bf16: MixedPrecisionPolicy(reduce_dtype=torch.float32)")
            break
    return {"mesh": sharding.describe(), "mp_policy": policies}


# --- the window ---


def iterate_loader(batches: Any) -> Iterator[Batch]:
    """Return an iterator over a loader; refuse a single batch."""
    is_iterable = hasattr(batches, "__iter__") or hasattr(batches, "__getitem__")
    if isinstance(batches, (Tensor, np.ndarray, Mapping, str)) or not is_iterable:
        raise ConfigError(
            f"windows takes an iterable of batches, such as a loader, not a {type(batches).__name__}",
            fix="for window in step.windows(loader): step(loss_fn, window); one batch: step(loss_fn, [batch])",
        )
    found: Iterator[Batch] = iter(batches)
    return found


def refuse_no_function(loss_fn: object) -> None:
    if not callable(loss_fn):
        raise ConfigError(
            f"loss_fn is a {type(loss_fn).__name__}, not a function",
            why="the step calls loss_fn with each batch of the window, in the step's precision",
            fix="step(loss_fn, window), in this order: move the forward pass and the loss into loss_fn(batch) -> loss",
        )


def read_window(given: object, accumulate: int) -> list[Batch]:
    """Return the batches of one step, at most `accumulate`, from a list, a tuple or an iterator."""
    if type(given) is list and len(given) == 1:  # what most steps get; looks at abstract classes take long
        return list(given)
    if given is None:
        _refuse("is missing")
    if isinstance(given, Iterator):
        window = list(itertools.islice(given, accumulate + 1))  # the iterator may be endless
        if len(window) > accumulate:
            _refuse(f"gives more than the accumulate={accumulate} batches of one step")
    else:
        is_record = hasattr(given, "_fields")
        if isinstance(given, (str, bytes)) or is_record or not isinstance(given, Sequence):
            _refuse(f"is a {type(given).__name__}, not a list of batches")
        if len(given) > accumulate:
            _refuse(f"contains {len(given)} entries, more than the accumulate={accumulate} batches of one step")
        window = list(given)
    kinds = {(batch.dtype, batch.ndim) if isinstance(batch, Tensor) else type(batch) for batch in window}
    if len(kinds) > 1 and any(isinstance(batch, Tensor) for batch in window):
        _refuse("contains tensors of different dtypes or dimensions, like the entries of one batch")
    if isinstance(given, tuple) and len(window) > 1 and all(isinstance(batch, Tensor) for batch in window):
        _refuse(f"is a tuple of {len(window)} tensors, like a batch; put batches that are tensors into a list")
    return window


def _refuse(found: str) -> NoReturn:
    raise ConfigError(
        f"the window {found}",
        why="a step takes a window, a list of at most `accumulate` batches; a single batch would be iterated over",
        fix="loop over step.windows(loader), or pass one batch as step(loss_fn, [batch])",
    )
