"""`apply`: give a model's modules the storage and compute format of their rows, in place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch import nn

from halfstep.errors import PrecisionError
from halfstep.precision.contexts import get_autocast_dtype, get_device_type
from halfstep.precision.fp8 import InFp8, InTorchaoFp8, read_torchao_settings
from halfstep.precision.ladder import Grant
from halfstep.precision.row import ROOT, WHOLE_MODEL, PlanRow
from halfstep.precision.rows import make_rows, walk_modules
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
        _swap_classes(modules[name], row, enclosing=_find_enclosing_dtype(name, rows, plan), plan=plan)
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


def _swap_classes(module: nn.Module, row: PlanRow, *, enclosing: torch.dtype | None, plan: Plan) -> None:
    if row.compute == "fp8" and isinstance(module, nn.Linear):
        if plan.simulated:
            swap_class(module, InFp8)
        else:
            swap_class(module, InTorchaoFp8, **read_torchao_settings())
    dtype = get_autocast_dtype(row.precision)
    if row.is_part and dtype != enclosing:
        set_compute_(module, dtype, plan)


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
    """Cast, swap and freeze the parts in place, by their rows; evaluation mode, no gradients.

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
