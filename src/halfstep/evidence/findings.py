"""Where what ran differs from what the plan declares: named by module path, with the reason and the fix."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from halfstep.evidence.observer import OUTSIDE, Product, Seen
from halfstep.evidence.operations import HALF, format_of
from halfstep.precision.apply import STORAGE_DTYPES
from halfstep.precision.plan import ROOT, WHOLE_MODEL, Plan

Level = Literal["differs", "costs"]


class Expected:
    """The plan's rows by module, and what holds where there is none."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        rows = (*plan.rows, *plan.frozen)
        self.rows = {row.module: row for row in rows if row.kind != "island" and row.module != WHOLE_MODEL}

    def compute(self, module: str) -> str:
        """The format of its matmuls and convolutions: of its own row, of the part it lies in, or the plan's."""
        row = self.rows.get(module)
        while row is None and module not in ("", ROOT):
            module = module.rpartition(".")[0]
            enclosing = self.rows.get(module)
            row = enclosing if enclosing is not None and enclosing.is_part else None
        return row.compute if row is not None else self.plan.compute

    def storage(self, module: str) -> str:
        row = self.rows.get(module)
        return row.storage if row is not None else ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One difference. `differs` is against the plan, `costs` is memory and time that the plan says nothing about."""

    module: str
    what: str
    why: str
    fix: str
    level: Level = "differs"


def findings(plan: Plan, seen: Seen, model: nn.Module, frozen: Mapping[str, nn.Module]) -> list[Finding]:
    """The worst first: computing, then weights and statistics, then what only costs."""
    expected = Expected(plan)
    modules = {name or ROOT: module for name, module in model.named_modules()}
    for part, module in frozen.items():
        modules |= {f"{part}.{name}".rstrip("."): inner for name, inner in module.named_modules()}
    found = [*_of_products(expected, seen), *_of_weights(expected, modules), *_of_statistics(modules)]
    return [*found, *_of_upcasts(expected, seen), *_of_norms(expected, seen)]


def _of_products(expected: Expected, seen: Seen) -> Iterable[Finding]:
    """One finding per module, reason and format."""
    shown = set()
    for product in sorted(seen.calls, key=lambda p: p.direction == "backward"):
        planned = expected.compute(product.module)
        if product.module == OUTSIDE or is_as_planned(expected, product):
            continue
        why, fix = _reason(product, planned, expected.plan)
        if (product.module, why) not in shown:
            shown.add((product.module, why))
            what = f"{product.operation} ({product.direction}) computed in {product.format}, the plan says {planned}"
            yield Finding(module=product.module, what=what, why=why, fix=fix)


def is_as_planned(expected: Expected, product: Product) -> bool:
    planned, plan = expected.compute(product.module), expected.plan
    if product.module == OUTSIDE or product.format == planned or product.is_island and product.format == "fp32":
        return True
    # Simulation multiplies the rounded operands in fp32.
    return plan.simulated and planned in ("fp8", "tf32") and product.format in ("fp32", "bf16")


def _reason(product: Product, planned: str, plan: Plan) -> tuple[str, str]:
    module, device = product.module, plan.device.partition(":")[0] or "cuda"
    dtype = "torch.float16" if planned == "fp16" else "torch.bfloat16"
    if product.format == "tf32":
        return (
            "a TF32 switch was set inside the model",
            "remove allow_tf32 = True or set_float32_matmul_precision('high') there, or ask for precision tf32",
        )
    if product.is_custom:
        return (
            f"custom op {product.operation} without autocast: it takes what it is given",
            f'torch.library.register_autocast("{product.operation}", "{device}", {dtype})',
        )
    if product.function:
        return (
            f"{product.function} is an autograd Function unaware of autocast: its backward runs outside of it",
            f'@torch.amp.custom_fwd(device_type="{device}") on its forward, '
            f'@torch.amp.custom_bwd(device_type="{device}") on its backward',
        )
    if planned in (*HALF, "fp8"):
        return (
            "autocast is off there",
            f"remove autocast(enabled=False), or say that it is meant: with hs.fp32_island(), "
            f"or precision.modules: {{{module}: {product.format}}}",
        )
    return (
        f"its operands are {product.format}: half weights, a cast, or autocast switched on inside",
        f"remove .half(), .bfloat16() or autocast there, or precision.modules: {{{module}: {product.format}}}",
    )


def _of_weights(expected: Expected, modules: Mapping[str, nn.Module]) -> Iterable[Finding]:
    for name, module in modules.items():
        planned = expected.storage(name)
        for own, weight in module.named_parameters(recurse=False):
            stored = format_of(weight.dtype)
            if planned and weight.is_floating_point() and stored != planned:
                yield Finding(
                    module=name,
                    what=f"{own} is stored in {stored}, the plan says {planned}",
                    why="it was cast after the plan was made, or came so: small updates round away in half",
                    fix=f"model.get_submodule({name.replace(ROOT, '')!r}).to({STORAGE_DTYPES[planned]}) "
                    "before the optimizer is made",
                )


def _of_statistics(modules: Mapping[str, nn.Module]) -> Iterable[Finding]:
    for name, module in modules.items():
        if not isinstance(module, _NormBase):
            continue
        half = [own for own, buffer in module.named_buffers(recurse=False) if format_of(buffer.dtype) in HALF]
        if half:
            yield Finding(
                module=name,
                what=f"{' and '.join(half)} in {format_of(module.get_buffer(half[0]).dtype)}",
                why="a running statistic in half stops moving: its updates are below half a unit in the last place",
                fix=f"model.get_submodule({name!r}).float()",
            )


def _of_upcasts(expected: Expected, seen: Seen) -> Iterable[Finding]:
    for upcast, size in seen.upcasts.items():
        if upcast.module != OUTSIDE and expected.compute(upcast.module) in HALF:
            yield Finding(
                module=upcast.module,
                what=f"cast to fp32 by hand at {upcast.line}, {size:,} bytes",
                why="what follows it computes and is kept in fp32 until the next matmul",
                fix="remove .float() (.to(torch.float32)), or say that it is meant: with hs.fp32_island()",
                level="costs",
            )


def _of_norms(expected: Expected, seen: Seen) -> Iterable[Finding]:
    """Under autocast a normalisation returns fp32: harmless before a matmul, which casts it, twice the memory else."""
    for module, size in seen.norms_kept.items():
        if expected.plan.compute in (*HALF, "fp8") and not _is_in_fp32(expected, module):
            yield Finding(
                module=module,
                what=f"its fp32 output is kept for backward, {size:,} bytes",
                why="autocast returns normalisations in fp32, and what reads it next keeps it as it is",
                fix="cast it where it is used: norm(x).to(x.dtype), or fuse it with what follows",
                level="costs",
            )


def _is_in_fp32(expected: Expected, norm: str) -> bool:
    """Whether the part around it is declared fp32; the norm's own row says fp32 always."""
    return expected.compute(norm.rpartition(".")[0] or ROOT) == "fp32"
