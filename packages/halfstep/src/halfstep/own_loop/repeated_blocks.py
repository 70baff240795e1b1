"""Activation checkpointing for arbitrary models: find repeated blocks in the module tree and swap their class.

A block is a module with submodules whose kind occurs more than once in the model, or that a ModuleList holds; the kind
of a Sequential is the list of its layers. A stage that contains a list of blocks is not a block, nor is a module that
is never called; their submodules may be. tune/choose.py tests on copies of the model whether recomputing gives the
same numbers.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Iterable
from itertools import cycle
from typing import Any, ClassVar

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from halfstep import recompute
from halfstep.precision.swapped import SwappedModule, find_original_class, swap_class
from halfstep.recompute import Recompute, Recomputing

LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


class Recomputed(SwappedModule):
    """A block that keeps its inputs for backward, and those of its activations that `how` selects."""

    how: ClassVar[Recompute]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        forward = super().forward
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        if torch.compiler.is_compiling():
            return checkpoint(
                forward, *args, use_reentrant=False, **recompute.make_compiled_contexts(self.how), **kwargs
            )
        # Flat, so that checkpoint() sees each tensor's device, saves its generator, and notices in-place writes.
        inputs, shape = tree_flatten((args, kwargs), is_leaf=_is_cache)

        def run(*flat: Any) -> Any:
            positional, named = tree_unflatten([None if _is_cache(value) else value for value in flat], shape)
            return forward(*positional, **named)

        contexts = recompute.make_contexts(self, self.how)
        with recompute.disable_autocast_cache(self.how == "pointwise"):
            return checkpoint(run, *inputs, use_reentrant=False, context_fn=contexts)


class OutOfPlace(SwappedModule):
    """Make an in-place layer write out of place: its input may be an activation that a selective region keeps."""

    inplace = property(lambda self: False, lambda self, value: None)


def _is_cache(value: Any) -> bool:
    """True if an argument is transformers' cache of keys and values, to which a second forward would append."""
    return any(kind.__name__ == "Cache" for kind in type(value).__mro__)


def recompute_blocks_(model: nn.Module, how: Recompute, names: Collection[str]) -> None:
    """Recompute from now on: by the model's own support, or else the blocks with these names."""
    if recompute.set_recompute(model, how):
        return
    for module in model.modules():
        if isinstance(module, (Recomputed, OutOfPlace)):
            object.__setattr__(module, "__class__", module.made_from[0])
    logging.getLogger("torch._higher_order_ops.wrap").addFilter(recompute.is_not_reminder)
    ways: tuple[Recompute, ...] = ("blocks", "pointwise") if how == "alternate" else (how,)
    for name, way in zip(names if how != "none" else (), cycle(ways), strict=False):
        block = model.get_submodule(name)
        swap_class(block, Recomputed, how=way)
        for part in block.modules() if way == "pointwise" else ():
            if vars(part).get("inplace") is True:
                swap_class(part, OutOfPlace)


def find_blocks(model: nn.Module, uncalled: Collection[str] = (), *, of_any: bool = False) -> list[str]:
    """Return the names of repeated blocks; none if the model supports recomputing itself, unless `of_any` model they
    are wanted. `uncalled` ones are left out."""
    times = Counter(_get_kind(module) for _, module in model.named_modules(remove_duplicate=False))
    found: dict[nn.Module, str] = {}

    def look_into(parent: nn.Module, prefix: str) -> None:
        for key, child in parent.named_children():
            # A layer without submodules counts only in a list: elsewhere it is a norm or an activation.
            name, is_one = f"{prefix}{key}", isinstance(parent, LISTS) or next(child.children(), None) is not None
            is_repeated = times[_get_kind(child)] > 1 or isinstance(parent, nn.ModuleList)
            if is_one and is_repeated and name not in uncalled and _may_be_block(child) and not _is_stage(child):
                found.setdefault(child, name)
            elif not isinstance(child, torch.jit.ScriptModule):
                look_into(child, f"{name}.")

    if of_any or not any(isinstance(module, Recomputing) for module in model.modules()):
        look_into(model, "")
    return list(found.values())


def _get_kind(module: nn.Module) -> tuple[type[nn.Module], ...]:
    parts = module.children() if find_original_class(module) is nn.Sequential else ()
    return (find_original_class(module), *map(find_original_class, parts))


def _may_be_block(module: nn.Module) -> bool:
    """True if it has several layers or is a custom one, with its class's forward: a patched forward would hide
    ours. Hooks of its submodules would run twice; only torch's own, such as weight_norm's, may."""
    parts = list(module.modules())[1:]
    is_layer = type(module).__module__.startswith("torch.nn.modules") or not module._parameters
    if not parts and is_layer or type(module).forward is nn.Module.forward or "forward" in vars(module):
        return False
    hooks = (hook for part in parts for hook in (*part._forward_hooks.values(), *part._forward_pre_hooks.values()))
    is_script = isinstance(module, torch.jit.ScriptModule)
    return not is_script and all(type(hook).__module__.startswith("torch.nn.utils") for hook in hooks)


def _is_stage(module: nn.Module) -> bool:
    """True if it contains a list of blocks itself."""
    lists = (part.children() for part in module.modules() if isinstance(part, LISTS))
    kinds = (Counter(_get_kind(part) for part in parts if _may_be_block(part)) for parts in lists)
    return any(times > 1 for counted in kinds for times in counted.values())


def group_by_kind(model: nn.Module, names: Iterable[str]) -> list[list[str]]:
    kinds: dict[Any, list[str]] = {}
    for name in names:
        kinds.setdefault(_get_kind(model.get_submodule(name)), []).append(name)
    return list(kinds.values())


def describe_blocks(model: nn.Module, names: Iterable[str]) -> str:
    """Return a line such as `12 x Block (transformer.h.0 ... transformer.h.11)`."""
    alike = [(find_original_class(model.get_submodule(some[0])), some) for some in group_by_kind(model, names)]
    ends = [" ... ".join(dict.fromkeys((some[0], some[-1]))) for _, some in alike]
    return ", ".join(f"{len(some)} x {kind.__name__} ({end})" for (kind, some), end in zip(alike, ends, strict=True))


def describe_recomputed(model: nn.Module) -> str:
    """Describe which blocks are recomputed and how; empty if none are, or if the model does it itself."""
    blocks = {name: part.how for name, part in model.named_modules() if isinstance(part, Recomputed)}
    ways = {*blocks.values()}
    return f"{'alternate' if len(ways) > 1 else ways.pop()}: {describe_blocks(model, blocks)}" if blocks else ""
