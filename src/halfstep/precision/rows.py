"""One row a module: which grant holds for it, how its weights are stored, what it computes in."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from halfstep.errors import PrecisionError, nearest
from halfstep.precision.ladder import Grant
from halfstep.precision.parts import original_class
from halfstep.precision.plan import ROOT, Row, RowKind

UPCAST_BY_AUTOCAST = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
LOOKUPS = (nn.Embedding, nn.EmbeddingBag)

FP8_MULTIPLE = 16
"""The fp8 matmul of the matrix units takes rows of 16 bytes only (cuBLASLt, torch._scaled_mm)."""


def rows_of(model: nn.Module, default: Grant, parts: Mapping[str, Grant], *, cuda_lists: bool) -> list[Row]:
    """A row for every module with weights of its own, and for the outermost modules that a pattern names."""
    grants = grants_by_module(model, default, parts)
    rows = []
    for name, module in model.named_modules():
        answer = grants[name]
        is_boundary = answer is not default and grants.get(_parent(name)) is not answer
        if is_boundary or has_own_weights(module):
            rows.append(_row(name, module, answer, is_part=answer is not default, cuda_lists=cuda_lists))
    return rows


def grants_by_module(model: nn.Module, default: Grant, parts: Mapping[str, Grant]) -> dict[str | None, Grant]:
    """The last pattern that matches a module's name decides; else its parent's grant holds."""
    names = [name for name, _ in model.named_modules()]
    for pattern in parts:
        if not any(fnmatchcase(name, pattern) for name in names if name):
            depth = pattern.count(".")
            near = nearest(pattern.removesuffix(".*"), [name for name in names if name and name.count(".") <= depth])
            raise PrecisionError(f"modules: {pattern!r} matches no module of {type(model).__name__}", fix=near)
    grants: dict[str | None, Grant] = {}
    for name in names:  # named_modules gives parents before their children
        own = [answer for pattern, answer in parts.items() if name and fnmatchcase(name, pattern)]
        grants[name] = own[-1] if own else grants.get(_parent(name), default)
    return grants


def has_own_weights(module: nn.Module) -> bool:
    """Parameters of the module itself, not of its children."""
    return any(True for _ in module.parameters(recurse=False))


def takes_fp8(module: nn.Module) -> bool:
    """Linear layers whose sides the fp8 matmul can take; a subclass may compute otherwise, so it is left alone."""
    if not isinstance(module, nn.Linear) or original_class(module) is not nn.Linear:
        return False
    return module.in_features % FP8_MULTIPLE == 0 and module.out_features % FP8_MULTIPLE == 0


def _parent(name: str) -> str | None:
    """Qualified name of the enclosing module; the root is "" and has no parent."""
    return name.rpartition(".")[0] if name else None


def _row(name: str, module: nn.Module, answer: Grant, *, is_part: bool, cuda_lists: bool) -> Row:
    weights = list(module.parameters())
    is_frozen = bool(weights) and not any(weight.requires_grad for weight in weights)
    kind: RowKind = "default" if not is_part else "frozen" if is_frozen else "module"
    storage, compute, reason = answer.storage, answer.compute, _reason(answer, is_part=is_part, is_frozen=is_frozen)
    if isinstance(module, _NormBase) and storage != "fp32":
        storage, reason = "fp32", "running statistics in half would lose their updates"
    elif answer.is_mixed and cuda_lists and isinstance(module, UPCAST_BY_AUTOCAST):
        compute, reason = "fp32", "autocast computes this normalisation in fp32"
    elif answer.is_mixed and isinstance(module, LOOKUPS):
        compute, reason = storage, "a lookup, no arithmetic"
    elif answer.compute == "fp8" and has_own_weights(module) and not takes_fp8(module):
        compute, reason = "bf16", f"fp8 takes plain Linear layers with sides divisible by {FP8_MULTIPLE}"
    precision = answer.precision if is_part else ""
    return Row(module=name or ROOT, storage=storage, compute=compute, reason=reason, kind=kind, precision=precision)


def _reason(answer: Grant, *, is_part: bool, is_frozen: bool) -> str:
    if not is_part:
        return "the default" + (", frozen" if is_frozen else "")
    asked = answer.reason if answer.warning else f"asked for {answer.asked}"
    return f"frozen, {asked}" if is_frozen else asked
