"""Deep networks that are not compiled as a whole: by their blocks, or by kernels of our own where steps are captured.

The compiler takes minutes for a U-Net of 860M parameters, and leaves channels_last on the way (8 of 44 ms of a VAE's
compiled step were layout copies; why is not known). So a workload names blocks that its network repeats. In a captured
step each runs by the forward that is named beside it, which calls kernels of our own; launches cost nothing there. A
block without one is compiled alone, once for all of its shape. Steps that are compiled and not captured launch one by
one: there the region is compiled whole, or, where a block has to be compiled in any case, block by block.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from halfstep.kernels.fast_forms import decided, forced

MOST_SHAPES = 64
"""Of one kind of block; torch gives up at 8."""

Blocks = Mapping[type[nn.Module], Callable[..., Any] | None]
"""Kinds of blocks, each with its forward in captured steps; None: compiled."""


def by_blocks(region: Callable[..., Any], blocks: Blocks, compiler: Callable[..., Any]) -> Callable[..., Any]:
    """The region in one of these forms; `compiler` is torch.compile as it is to be called."""
    compiled = functools.cache(compiler)
    is_whole = all(forward is not None for forward in blocks.values())

    def run(*arguments: Any) -> Any:
        is_captured = decided("chain", otherwise=True)
        if is_whole and not is_captured:
            return compiled(region)(*arguments)
        # A forward of its own: a kind that inherits it has it from its parent, which may not be asked for.
        own = {kind: given for kind, given in blocks.items() if "forward" in vars(kind)}
        forwards = {k: given if given and is_captured else compiled(plain(k)) for k, given in own.items()}
        with _swapped(forwards), forced(is_captured, "group_norm"), most_shapes():
            return region(*arguments)

    return run


def plain(kind: type[nn.Module]) -> Callable[..., Any]:
    """The class's forward itself."""
    forward: Callable[..., Any] = kind.forward
    return forward


def most_shapes() -> contextlib.AbstractContextManager[None]:
    found: contextlib.AbstractContextManager[None] = torch._dynamo.config.patch(recompile_limit=MOST_SHAPES)
    return found


@contextlib.contextmanager
def _swapped(forwards: Mapping[type[nn.Module], Any]) -> Iterator[None]:
    """Classes have these forwards inside. Not the modules: a copied or stored module would take its own along."""
    before = {kind: kind.forward for kind in forwards}
    for kind, forward in forwards.items():
        kind.forward = forward
    try:
        yield
    finally:
        for kind, forward in before.items():
            kind.forward = forward
