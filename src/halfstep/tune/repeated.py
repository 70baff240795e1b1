"""Compiling a deep network by its blocks: those of one kind and shape share their code.

The compiler takes a minute and more for a U-Net of 860M parameters as a whole, which holds 22 residual blocks of 14
shapes and 16 transformers of four. Compiled alone, each shape is compiled once; what lies between blocks (a few single
convolutions, the concatenations) runs eager, and a captured step launches it for nothing.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

MOST_SHAPES = 64
"""Of one kind of block; torch gives up at 8."""

Kinds = tuple[type[nn.Module], ...]


def by_blocks(region: Callable[..., Any], kinds: Kinds, compiler: Callable[..., Any]) -> Callable[..., Any]:
    """The region with every block of these kinds compiled (by torch.compile in the form it is given), wherever it
    calls one."""

    @functools.cache
    def forwards() -> dict[type[nn.Module], Any]:
        # A forward of its own: a kind that inherits it has it from its parent, which may not be asked for.
        own = [kind for kind in kinds if "forward" in vars(kind)]
        return {kind: compiler(kind.forward) for kind in own}

    def in_blocks(*arguments: Any) -> Any:
        with _swapped(forwards()), torch._dynamo.config.patch(recompile_limit=MOST_SHAPES):
            return region(*arguments)

    return in_blocks


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
