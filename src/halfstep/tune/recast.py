"""Autocast's half copies of weights, cast again for backward instead of kept from forward on.

2 bytes per parameter less where memory is highest, for one more cast of each. Gradients have the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


@contextmanager
def weights_cast_again() -> Iterator[None]:
    """Copies live while their layer runs."""
    was_kept = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        with torch.autograd.graph.saved_tensors_hooks(_without_copy, _copied_again):
            yield
    finally:
        torch.set_autocast_cache_enabled(was_kept)


Source = tuple[nn.Parameter, torch.dtype, bool]
"""A parameter, the format of its copy, and whether that is transposed, as linear layers keep it."""


def _without_copy(kept: Tensor) -> Tensor | Source:
    """What autograd keeps of a tensor: of a parameter's copy the parameter; detached, or an output that no backward
    passes would hold its node, which holds it."""
    cast, is_turned = kept.grad_fn, False
    if cast is not None and cast.name() == "TBackward0":
        cast, is_turned = cast.next_functions[0][0], True
    if cast is None or cast.name() != "ToCopyBackward0":
        return kept.detach()
    source = getattr(cast.next_functions[0][0], "variable", None)
    if not isinstance(source, nn.Parameter) or source.numel() != kept.numel() or source.device != kept.device:
        return kept.detach()
    return source, kept.dtype, is_turned


def _copied_again(kept: Tensor | Source) -> Tensor:
    if isinstance(kept, Tensor):
        return kept
    source, dtype, is_turned = kept
    copy = source.detach().to(dtype)
    return copy.t() if is_turned else copy
