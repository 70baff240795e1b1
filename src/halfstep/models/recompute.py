"""Activation checkpointing: a block's activations are thrown away and computed again in backward."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint


class Blocks(nn.Sequential):
    """Blocks one after another, each recomputed in backward where `checkpointing` is set."""

    def __init__(self, blocks: Mapping[str, nn.Module], *, checkpointing: bool) -> None:
        super().__init__(OrderedDict(blocks))
        self.checkpointing = checkpointing

    def forward(self, x: Tensor) -> Tensor:
        run = block_runner(checkpointing=self.checkpointing)
        for block in self:
            x = run(block, x)
        return x


def block_runner(*, checkpointing: bool) -> Callable[..., Tensor]:
    """How a model's forward calls its blocks: plainly, or to be recomputed where a backward will come."""
    return run_checkpointed if checkpointing and torch.is_grad_enabled() else run


def run(block: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """Call the block."""
    return block(*inputs)


def run_checkpointed(block: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """Call the block and keep only its inputs."""
    # No layer draws random numbers, so the RNG state need not be kept. A compiled region recomputes only pure
    # values, so BatchNorm's statistics need shielding in eager mode alone.
    if torch.compiler.is_compiling():
        out = checkpoint(block, *inputs, use_reentrant=False, preserve_rng_state=False)
    else:
        out = checkpoint(
            block,
            *inputs,
            use_reentrant=False,
            preserve_rng_state=False,
            context_fn=lambda: (contextlib.nullcontext(), _spare_statistics(block)),
        )
    assert isinstance(out, Tensor)
    return out


@contextlib.contextmanager
def _spare_statistics(block: Callable[..., Tensor]) -> Iterator[None]:
    """Recomputing runs BatchNorm a second time: let it write its running statistics into throw-away copies."""
    assert isinstance(block, nn.Module)
    kept = [(norm, dict(norm._buffers)) for norm in block.modules() if isinstance(norm, _BatchNorm)]
    try:
        for norm, buffers in kept:
            norm._buffers.update({name: None if b is None else b.clone() for name, b in buffers.items()})
        yield
    finally:
        for norm, buffers in kept:
            norm._buffers.update(buffers)
