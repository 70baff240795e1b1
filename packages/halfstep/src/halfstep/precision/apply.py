"""Make the plan's rows, one per module, and apply them to a model in place: storage and compute format."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.nn.parallel import DistributedDataParallel

from halfstep.errors import PrecisionError, suggest_nearest
from halfstep.precision.contexts import get_autocast_dtype, get_device_type
from halfstep.precision.fp8 import Fp8Layers, InFp8, InTorchaoFp8, find_edge_layers, read_torchao_settings
from halfstep.precision.ladder import ROOT, WHOLE_MODEL, Grant, PlanRow, RowKind
from halfstep.precision.swapped import InFp32, InHalf, swap_class, undo_swaps

if TYPE_CHECKING:
    from halfstep.precision.plan import Plan  # whose methods call this file

STORAGE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def apply(plan: Plan, model: nn.Module, *, casts_storage: bool = True) -> nn.Module:
    """Cast weights to the storage of their rows, and swap the classes of modules that compute differently.

    Pass `casts_storage=False` if an optimizer already holds the weights: its state would not follow the cast.
    """
    undo_swaps(model)
    modules = dict(model.named_modules())
    rows = {row.module.replace(ROOT, ""): row for row in _find_rows(plan, model)}
    if unknown := sorted(set(rows) - set(modules)):
        raise PrecisionError(
            f"the plan has a row for {unknown[0]!r}, which {type(model).__name__} does not have",
            fix="make the plan again with this model",
        )
    for name, row in rows.items():
        if casts_storage:
            cast_storage_(modules[name], row)
        if row.compute == "fp8" and isinstance(modules[name], nn.Linear):
            settings = {} if plan.simulated else read_torchao_settings(plan.fp8_recipe)
            swap_class(modules[name], InFp8 if plan.simulated else InTorchaoFp8, **settings)
        dtype = get_autocast_dtype(row.precision)
        if row.is_part and dtype != _find_enclosing_dtype(name, rows, plan):
            set_compute_(modules[name], dtype, plan)
    return model


def _find_rows(plan: Plan, model: nn.Module) -> list[PlanRow]:
    """Return the plan's rows; a plan made without a model gets them here."""
    rows = [row for row in plan.rows if row.kind != "island"]
    if not any(row.module == WHOLE_MODEL for row in rows):
        return rows
    parts = {row.module: _make_grant(row.precision, plan) for row in rows if row.is_part}
    return make_rows(model, _make_grant(plan.granted, plan), parts, cuda_lists=True)


def _make_grant(precision: str, plan: Plan) -> Grant:
    return Grant(asked=precision, precision=precision, reason=plan.reason, simulated=plan.simulated)


def cast_storage_(module: nn.Module, row: PlanRow) -> None:
    """Cast the module's own parameters to the storage format of its row."""
    # Buffers keep their dtype: a table of positions or betas loses more precision in half than it saves memory.
    for weight in nn.Module.parameters(module, recurse=False):
        if weight.is_floating_point():
            weight.data = weight.data.to(STORAGE_DTYPES[row.storage])


def set_compute_(module: nn.Module, dtype: torch.dtype | None, plan: Plan) -> None:
    """Run the module under autocast to `dtype`, or in fp32 without autocast if `dtype` is None."""
    if dtype is None:
        swap_class(module, InFp32)
    else:
        swap_class(module, InHalf, device_type=get_device_type(plan), dtype=dtype)


def _find_enclosing_dtype(name: str, rows: Mapping[str, PlanRow], plan: Plan) -> torch.dtype | None:
    """Return autocast's dtype in the nearest enclosing row with its own precision, else the plan's; None if off."""
    while name:
        name = name.rpartition(".")[0]
        if name in rows and rows[name].is_part:
            return get_autocast_dtype(rows[name].precision)
    return get_autocast_dtype(plan.granted)


CONTAINERS = (nn.ModuleList, nn.ModuleDict)


def apply_frozen_(plan: Plan, frozen: Mapping[str, nn.Module]) -> None:
    """Freeze the parts in place (evaluation mode, no gradients), and set the formats that the plan's rows give them.

    A frozen part is called by any of its methods (`vae.encode`), inside autocast or outside, so its class and those of
    its children are swapped: they compute in the part's format and return fp32.
    """
    rows = {row.module: row for row in plan.frozen}
    for name, part in frozen.items():
        undo_swaps(part)
        part.eval().requires_grad_(False)
        entries: dict[nn.Module, torch.dtype | None] = {}
        for full, module in walk_modules(name, part):
            if (row := rows.get(full)) is None:
                continue
            cast_storage_(module, row)
            if row.precision:
                entries |= dict.fromkeys(_find_entries(module), get_autocast_dtype(row.precision))
        for module, dtype in entries.items():
            if dtype is not None or get_autocast_dtype(plan.granted) is not None:  # else there is no autocast to leave
                set_compute_(module, dtype, plan)


def _find_entries(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules that may be called from outside: the part, and the children that its other methods call."""
    yield module
    for child in module.children():
        if isinstance(child, CONTAINERS):
            yield from (entry for entry in _find_entries(child) if entry is not child)
        else:
            yield child


# --- one row per module: which grant applies to it, how its weights are stored, what it computes in ---

UPCAST_BY_AUTOCAST = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
LOOKUPS = (nn.Embedding, nn.EmbeddingBag)


def make_rows(
    model: nn.Module,
    default: Grant,
    parts: Mapping[str, Grant],
    *,
    cuda_lists: bool,
    fp8: Fp8Layers = Fp8Layers(),  # noqa: B008 frozen
    frozen: Iterable[str] = (),
) -> list[PlanRow]:
    """Return a row for every module with parameters and for the outermost modules that a pattern names.

    `frozen` names the frozen parts next to the model: a pattern that matches nothing may have meant one of them.
    """
    edges = find_edge_layers(model)
    grants = find_grants(model, default, parts, frozen)
    rows = []
    for name, module in model.named_modules():
        answer = grants[name]
        is_boundary = answer is not default and grants.get(_get_parent(name)) is not answer
        if is_boundary or has_own_weights(module):
            row = _make_row(name, module, answer, is_part=answer is not default, cuda_lists=cuda_lists)
            if row.compute == "fp8" and has_own_weights(module):  # kept where the module can run it and gains by it
                is_edge = name in edges and answer is default
                compute, reason = fp8.choose_compute(name, module, is_edge=is_edge, reason=row.reason)
                row = dataclasses.replace(row, compute=compute, reason=reason)
            rows.append(row)
    return rows


def find_grants(
    model: nn.Module, default: Grant, parts: Mapping[str, Grant], frozen: Iterable[str] = ()
) -> dict[str | None, Grant]:
    """Return each module's grant: that of the last pattern matching its name, else its parent's."""
    names = list_plain_names(model)
    for pattern in parts:
        if not any(_matches(name, plain, pattern) for name, plain in names.items()):
            raise _make_unknown_pattern(pattern, type(model).__name__, filter(None, names.values()), frozen)
    grants: dict[str | None, Grant] = {}
    for name, plain in names.items():
        own = [answer for pattern, answer in parts.items() if _matches(name, plain, pattern)]
        grants[name] = own[-1] if own else grants.get(_get_parent(name), default)
    return grants


def _make_unknown_pattern(
    pattern: str, owner: str, modules: Iterable[str], frozen: Iterable[str] = ()
) -> PrecisionError:
    """Suggest names that are no deeper than the pattern: a model has thousands of modules."""
    known = [*frozen, *(name for name in modules if name.count(".") <= pattern.count("."))]
    none = "leave it out: the model has no submodules, so the default precision covers all of it"
    return PrecisionError(
        f"precision.modules: {pattern!r} matches no module of {owner}",
        fix=suggest_nearest(pattern.removesuffix(".*"), known) if known else none,
    )


def _matches(name: str, plain: str, pattern: str) -> bool:
    return bool(plain) and (fnmatchcase(plain, pattern) or fnmatchcase(name, pattern))


def list_plain_names(model: nn.Module) -> dict[str, str]:
    """Map each full module name, parents first, to the name a user writes.

    torch.compile and DDP insert `_orig_mod` and `module` into the names of what they wrap; those are left out.
    """
    modules, plain = dict(model.named_modules()), {"": ""}
    for name in list(modules)[1:]:
        parent, _, last = name.rpartition(".")
        is_wrapped = last == "_orig_mod" or isinstance(modules[parent], DistributedDataParallel)
        plain[name] = plain[parent] if is_wrapped else f"{plain[parent]}.{last}".removeprefix(".")
    return plain


def has_own_weights(module: nn.Module) -> bool:
    """True if the module itself, not only its children, has parameters."""
    return any(True for _ in nn.Module.parameters(module, recurse=False))


def _get_parent(name: str) -> str | None:
    """Return the qualified name of the enclosing module; the root is "" and has no parent."""
    return name.rpartition(".")[0] if name else None


def _make_row(name: str, module: nn.Module, answer: Grant, *, is_part: bool, cuda_lists: bool) -> PlanRow:
    weights = list(module.parameters())
    is_frozen = bool(weights) and not any(weight.requires_grad for weight in weights)
    kind: RowKind = "default" if not is_part else "frozen" if is_frozen else "module"
    storage, compute, reason = answer.storage, answer.compute, answer.explain() if is_part else "the default"
    reason = f"frozen, {reason}" if is_frozen else reason
    if isinstance(module, _NormBase) and storage != "fp32":
        storage, reason = "fp32", "running statistics in half would lose their updates"
    elif answer.is_mixed and cuda_lists and isinstance(module, UPCAST_BY_AUTOCAST):
        compute, reason = "fp32", "autocast computes this normalisation in fp32"
    elif answer.is_mixed and isinstance(module, LOOKUPS):
        compute, reason = storage, "a lookup, no arithmetic"
    precision = answer.precision if is_part else ""
    return PlanRow(module=name or ROOT, storage=storage, compute=compute, reason=reason, kind=kind, precision=precision)


# --- frozen parts: modules that are used and not trained, each with its own precision ---
# Their weights never change, so those that autocast would cast at every call (of matmuls and convolutions) are cast
# once, in place: half the memory, no cast per step, and bit-exactly what autocast gives. Norms, tables and buffers stay
# fp32. `apply_frozen_` applies these rows.

CAST_BY_AUTOCAST = (nn.Linear, nn.Bilinear, _ConvNd, nn.MultiheadAttention)


def names_frozen_part(pattern: str, frozen: Mapping[str, nn.Module]) -> bool:
    """True if a pattern of `precision.modules` names a frozen part or a module inside one."""
    return pattern.partition(".")[0] in frozen


def make_frozen_rows(frozen: Mapping[str, nn.Module], default: Grant, parts: Mapping[str, Grant]) -> list[PlanRow]:
    """Return rows of frozen modules: one for each whole module, each submodule that a pattern names, and each submodule
    with its own parameters."""
    asked = {pattern.removesuffix(".*"): grant for pattern, grant in parts.items()}
    rows = []
    for name, part in frozen.items():
        modules = dict(walk_modules(name, part))
        # The longest first: of nested ones the innermost counts.
        ours = sorted((pattern for pattern in asked if names_frozen_part(pattern, {name: part})), key=len, reverse=True)
        own = {pattern: asked[pattern] for pattern in ours}
        for pattern in own:
            if pattern not in modules:
                raise _make_unknown_pattern(pattern, f"the frozen part {name}", modules)
        for full, module in modules.items():
            pattern = next((known for known in own if f"{full}.".startswith(f"{known}.")), "")
            is_entry = full in (name, pattern)
            if is_entry or has_own_weights(module):
                grant = own[pattern] if pattern else default
                rows.append(_make_frozen_row(full, module, grant, is_asked=bool(pattern), is_entry=is_entry))
    return rows


def _make_frozen_row(name: str, module: nn.Module, grant: Grant, *, is_asked: bool, is_entry: bool) -> PlanRow:
    if grant.compute == "fp8" and is_asked:
        fix = f"precision.modules: {{{name}: bf16}}"
        raise PrecisionError(f"the frozen part {name} cannot compute in fp8", fix=fix)
    compute = "bf16" if grant.compute == "fp8" else grant.compute
    storage = compute if grant.is_mixed and isinstance(module, CAST_BY_AUTOCAST) else "fp32"
    if grant.is_mixed and isinstance(module, UPCAST_BY_AUTOCAST):
        compute = "fp32"
    reason = f"frozen, {grant.explain() if is_asked or grant.warning else 'the default'}"
    precision = grant.precision if is_entry else ""
    return PlanRow(module=name, storage=storage, compute=compute, reason=reason, kind="frozen", precision=precision)


def walk_modules(name: str, part: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules of a frozen part with their full names, parents before their children."""
    for own, module in part.named_modules():
        yield f"{name}.{own}" if own else name, module
