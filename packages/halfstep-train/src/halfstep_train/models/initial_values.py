"""Initialise large models fast: draw weights once, with several threads, and only if they are needed.

torch initialises every layer on one core when it is created, and a model with custom initialisation then does it again:
a minute for 1.5 billion weights. Here `make_bare` creates layers without values, and `draw_normal_` gives every block
of a weight a separate stream (SFC64), so the numbers depend only on torch's seed, not on the number of threads.

Inside `skip_initialisation` nothing is drawn, for callers that load all weights afterwards or use only shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

DRAWN_AT_ONCE = 2**22
"""Values per stream; changing it changes the weights of every seed."""

_is_drawing = ContextVar("draws first values", default=True)
Layer = TypeVar("Layer", bound=nn.Module)
Arguments = ParamSpec("Arguments")


@contextmanager
def skip_initialisation() -> Iterator[None]:
    """Make `draw_normal_` leave weights uninitialised inside this context."""
    token = _is_drawing.set(False)
    try:
        yield
    finally:
        _is_drawing.reset(token)


def make_bare(layer: Callable[Arguments, Layer], *args: Arguments.args, **settings: Arguments.kwargs) -> Layer:
    """Create a torch layer without initialising it, on the current default device."""
    device = torch.get_default_device()
    with torch.device("meta"):
        made = layer(*args, **settings)
    return made.to_empty(device=device)


def draw_normal_(weights: Sequence[tuple[Tensor, float]]) -> None:
    """Fill weights with normal numbers; each is given with its standard deviation."""
    if not _is_drawing.get():
        return
    root = int(torch.randint(2**62, (), device="cpu"))
    jobs = [
        (block, deviation, (root, number, index))
        for number, (weight, deviation) in enumerate(weights)
        if not weight.is_meta
        for index, block in enumerate(weight.detach().view(-1).split(DRAWN_AT_ONCE))
    ]
    with ThreadPoolExecutor(torch.get_num_threads()) as threads:
        for _ in threads.map(_draw_, jobs):
            pass


def _draw_(job: tuple[Tensor, float, tuple[int, ...]]) -> None:
    """Fill one block of a weight from its own stream."""
    block, deviation, key = job
    generator = np.random.Generator(np.random.SFC64(np.random.SeedSequence(key)))
    is_plain = block.device.type == "cpu" and block.dtype == torch.float32
    values: Any = block.numpy() if is_plain else np.empty(len(block), np.float32)
    generator.standard_normal(out=values, dtype=np.float32)
    values *= np.float32(deviation)
    if not is_plain:
        block.copy_(torch.from_numpy(values))
