"""Frozen parts: modules that are used and not trained, each with a precision of its own.

Nothing is ever added to their weights, so those that autocast would cast at every call (of matmuls and convolutions)
are cast once, in place: half the memory, no cast per step, and the very bits that autocast gives. Norms, tables and
buffers stay fp32.

A part is called where it pleases (`vae.encode`), inside autocast or outside, so its class and those of its children are
swapped (parts.py): they compute in the part's format and give fp32.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd

from halfstep.errors import PrecisionError, nearest
from halfstep.precision.apply import compute_in_, store_
from halfstep.precision.contexts import autocast_dtype
from halfstep.precision.ladder import Grant
from halfstep.precision.parts import undo_swaps
from halfstep.precision.plan import Plan, Row
from halfstep.precision.rows import UPCAST_BY_AUTOCAST, has_own_weights

CAST_BY_AUTOCAST = (nn.Linear, nn.Bilinear, _ConvNd, nn.MultiheadAttention)
CONTAINERS = (nn.ModuleList, nn.ModuleDict)


def is_of_frozen(pattern: str, frozen: Mapping[str, nn.Module]) -> bool:
    """Whether a pattern of `precision.modules` names a frozen part, or something in one."""
    return pattern.partition(".")[0] in frozen


def frozen_rows(frozen: Mapping[str, nn.Module], default: Grant, parts: Mapping[str, Grant]) -> list[Row]:
    """A row for every part, for what a pattern names in it, and for every module with weights of its own."""
    asked = {pattern.removesuffix(".*"): grant for pattern, grant in parts.items()}
    rows = []
    for name, part in frozen.items():
        modules = dict(_named(name, part))
        own = {pattern: grant for pattern, grant in asked.items() if is_of_frozen(pattern, {name: part})}
        _refuse_unknown(own, modules, name)
        for full, module in modules.items():
            pattern = next((known for known in _enclosing(full) if known in own), "")
            is_entry = full in (name, pattern)
            if is_entry or has_own_weights(module):
                grant = own[pattern] if pattern else default
                rows.append(_row(full, module, grant, is_asked=bool(pattern), is_entry=is_entry))
    return rows


def _row(name: str, module: nn.Module, grant: Grant, *, is_asked: bool, is_entry: bool) -> Row:
    if grant.compute == "fp8" and is_asked:
        fix = f"precision.modules: {{{name}: bf16}}"
        raise PrecisionError(f"the frozen part {name} cannot compute in fp8", fix=fix)
    compute = "bf16" if grant.compute == "fp8" else grant.compute
    storage = compute if grant.is_mixed and isinstance(module, CAST_BY_AUTOCAST) else "fp32"
    if grant.is_mixed and isinstance(module, UPCAST_BY_AUTOCAST):
        compute = "fp32"
    asked = grant.reason if grant.warning else f"asked for {grant.asked}" if is_asked else "the default"
    return Row(
        module=name,
        storage=storage,
        compute=compute,
        reason=f"frozen, {asked}",
        kind="frozen",
        precision=grant.precision if is_entry else "",
    )


def apply_frozen_(plan: Plan, frozen: Mapping[str, nn.Module]) -> None:
    """Cast, swap and freeze the parts in place, by their rows; evaluation mode, no gradients."""
    rows = {row.module: row for row in plan.frozen}
    for name, part in frozen.items():
        undo_swaps(part)
        part.eval().requires_grad_(False)
        entries: dict[nn.Module, torch.dtype | None] = {}
        for full, module in _named(name, part):
            if (row := rows.get(full)) is None:
                continue
            store_(module, row)
            if row.precision:
                entries |= dict.fromkeys(_entries(module), autocast_dtype(row.precision))
        for module, dtype in entries.items():
            if dtype is not None or autocast_dtype(plan.granted) is not None:  # else there is no autocast to leave
                compute_in_(module, dtype, plan)


def _entries(module: nn.Module) -> Iterator[nn.Module]:
    """What can be called of a part: itself, and what its other methods call, which are its children."""
    yield module
    for child in module.children():
        if isinstance(child, CONTAINERS):
            yield from (entry for entry in _entries(child) if entry is not child)
        else:
            yield child


def _named(name: str, part: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Parents before their children."""
    for own, module in part.named_modules():
        yield f"{name}.{own}" if own else name, module


def _enclosing(name: str) -> Iterator[str]:
    """The name itself, then those around it."""
    while name:
        yield name
        name = name.rpartition(".")[0]


def _refuse_unknown(patterns: Mapping[str, Grant], modules: Mapping[str, nn.Module], part: str) -> None:
    for pattern in patterns:
        if pattern not in modules:
            known = [name for name in modules if name.count(".") <= pattern.count(".")]
            raise PrecisionError(
                f"precision.modules: {pattern!r} names nothing in the frozen part {part}", fix=nearest(pattern, known)
            )
