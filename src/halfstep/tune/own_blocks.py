"""Blocks of a model that knows nothing of recomputing: found in its module tree, recomputed by a swapped class.

A block is a module with parts, whose kind occurs more than once in the model, or which is held by a ModuleList:

    ModuleList, Sequential    `.layers`, `.h`, `.blocks`, `layer1` ... `layer4`: their elements
    attributes                `down1` ... `down4` of one class
    nested ones               a stage that holds a list of blocks is no block, its blocks are
    not called                a ModuleList has no forward; of what has one and is never called, the parts count

The kind of a Sequential is what it consists of. What the tree cannot tell, whether recomputing gives the same numbers,
recompute_check.py tries on a copy of the model.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from halfstep.models.recompute import (
    Recompute,
    Recomputing,
    compiled_contexts,
    contexts_of,
    is_no_reminder,
    no_autocast_cache,
    set_recompute,
)
from halfstep.precision.parts import Part, original_class, swap_class

LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)

Kind = tuple[type[nn.Module], ...]
"""A class, and for a Sequential those of its parts."""


class Recomputed(Part):
    """Keeps its inputs for backward, and of the rest what `how` says."""

    how: ClassVar[Recompute]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return super().forward(*args, **kwargs)
        if torch.compiler.is_compiling():
            contexts = compiled_contexts(self.how)
            return checkpoint(super().forward, *args, use_reentrant=False, **contexts, **kwargs)
        forward = super().forward
        # Flat, so that each tensor's device is seen, whose generator is kept, and each write into one is noticed.
        inputs, shape = tree_flatten((args, kwargs), is_leaf=_is_cache)
        inputs = [None if _is_cache(value) else value for value in inputs]

        def run(*flat: Any) -> Any:
            positional, named = tree_unflatten(list(flat), shape)
            return forward(*positional, **named)

        with no_autocast_cache(self.how == "pointwise"):
            return checkpoint(run, *inputs, use_reentrant=False, context_fn=contexts_of(self, self.how))


class OutOfPlace(Part):
    """A layer that writes into its input does not, where that input may be what a selective region keeps."""

    inplace = property(lambda self: False, lambda self, value: None)


def _is_cache(value: Any) -> bool:
    """transformers' keys and values of earlier tokens: training has none, and a second forward would append to them."""
    return any(kind.__name__ == "Cache" for kind in type(value).__mro__)


def recompute_blocks_(model: nn.Module, how: Recompute, names: Collection[str]) -> None:
    """Recompute from now on: what the model itself knows to, or else the blocks of these names."""
    if set_recompute(model, how):
        return
    for module in model.modules():
        if isinstance(module, (Recomputed, OutOfPlace)):
            object.__setattr__(module, "__class__", module.made_from[0])
    if how == "none":
        return
    for block in map(model.get_submodule, names):
        swap_class(block, Recomputed, how=how)
        for part in block.modules() if how == "pointwise" else ():
            if vars(part).get("inplace") is True:
                swap_class(part, OutOfPlace)
    logging.getLogger("torch._higher_order_ops.wrap").addFilter(is_no_reminder)


# --- finding them ---


def found_blocks(model: nn.Module, uncalled: Collection[str] = ()) -> dict[str, Kind]:
    """Names of blocks, each with its kind; none in a model that knows to recompute by itself. `uncalled` are known not
    to be called, so that their parts are."""
    times = Counter(_kind(module) for _, module in model.named_modules(remove_duplicate=False) if _has_parts(module))
    found: dict[nn.Module, tuple[str, Kind]] = {}

    def look_into(parent: nn.Module, prefix: str) -> None:
        for key, child in parent.named_children():
            name = f"{prefix}{key}"
            is_repeated = times[_kind(child)] > 1 or isinstance(parent, nn.ModuleList)
            if is_repeated and _has_parts(child) and name not in uncalled and not _is_stage(child):
                found.setdefault(child, (name, _kind(child)))
            elif not isinstance(child, torch.jit.ScriptModule):
                look_into(child, f"{name}.")

    if not any(isinstance(module, Recomputing) for module in model.modules()):
        look_into(model, "")
    return dict(found.values())


def _kind(module: nn.Module) -> Kind:
    parts = module.children() if type(module) is nn.Sequential else ()
    return (original_class(module), *map(original_class, parts))


def _has_parts(module: nn.Module) -> bool:
    """Of several layers, or a layer of the user's own making, with weights; and called."""
    is_torchs = type(module).__module__.startswith("torch.nn.modules")
    has_parts = next(module.children(), None) is not None or not is_torchs and bool(module._parameters)
    return has_parts and _is_called(module)


def _is_called(module: nn.Module) -> bool:
    """By a forward that its class has: one of the object itself, as a compiled or patched module's, would hide ours.
    Hooks of its parts would run twice; torch's own, such as weight_norm's, may."""
    if type(module).forward is nn.Module.forward or "forward" in vars(module):
        return False
    hooks = (
        hook
        for part in module.modules()
        if part is not module
        for hook in (*part._forward_hooks.values(), *part._forward_pre_hooks.values())
    )
    is_script = isinstance(module, torch.jit.ScriptModule)
    return not is_script and all(type(hook).__module__.startswith("torch.nn.utils") for hook in hooks)


def _is_stage(module: nn.Module) -> bool:
    """Whether it holds a list of blocks itself."""
    lists = (part.children() for part in module.modules() if isinstance(part, LISTS))
    kinds = (Counter(_kind(part) for part in parts if _has_parts(part)) for parts in lists)
    return any(times > 1 for counted in kinds for times in counted.values())


# --- telling of them ---


def by_kind(blocks: Mapping[str, Kind]) -> dict[Kind, list[str]]:
    names: dict[Kind, list[str]] = defaultdict(list)
    for name, kind in blocks.items():
        names[kind].append(name)
    return names


def described(model: nn.Module, names: Iterable[str]) -> str:
    """`12 x Block (transformer.h.0 ... transformer.h.11)`."""
    return ", ".join(_described({name: _kind(model.get_submodule(name)) for name in names}))


def _described(blocks: Mapping[str, Kind]) -> Iterator[str]:
    for kind, names in by_kind(blocks).items():
        where = names[0] if len(names) == 1 else f"{names[0]} ... {names[-1]}"
        yield f"{len(names)} x {kind[0].__name__} ({where})"
