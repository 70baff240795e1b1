"""First values of large models: drawn once, by several threads, and only if they are needed.

torch fills every layer when it is created, on one core, and a model with its own initialisation then fills it again: a
minute for 1.5 billion weights. Here `make_bare` creates layers without values, and `draw_normal_` gives every block of
a weight its own stream (SFC64), so the numbers follow from torch's seed alone, for any number of threads.

Inside `skip_first_values` nothing is drawn: for callers that load all weights afterwards, or only look at shapes.
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

PIECE = 2**22
"""Values per stream; changing it changes the values that a seed draws."""

_draws = ContextVar("draws first values", default=True)
Layer = TypeVar("Layer", bound=nn.Module)
Arguments = ParamSpec("Arguments")


@contextmanager
def skip_first_values() -> Iterator[None]:
    """Build models inside without drawing values: `draw_normal_` leaves their memory as it is."""
    token = _draws.set(False)
    try:
        yield
    finally:
        _draws.reset(token)


def make_bare(layer: Callable[Arguments, Layer], *args: Arguments.args, **settings: Arguments.kwargs) -> Layer:
    """Create a torch layer without initialising it, on the current default device."""
    place = torch.get_default_device()
    with torch.device("meta"):
        made = layer(*args, **settings)
    return made.to_empty(device=place)


def draw_normal_(weights: Sequence[tuple[Tensor, float]]) -> None:
    """Fill each weight with normal numbers of its standard deviation."""
    if not _draws.get():
        return
    root = int(torch.randint(2**62, (), device="cpu"))
    pieces = [
        (piece, deviation, (root, number, place))
        for number, (weight, deviation) in enumerate(weights)
        if not weight.is_meta
        for place, piece in enumerate(weight.detach().view(-1).split(PIECE))
    ]
    with ThreadPoolExecutor(torch.get_num_threads()) as threads:
        for _ in threads.map(_draw_, pieces):
            pass


def _draw_(job: tuple[Tensor, float, tuple[int, ...]]) -> None:
    piece, deviation, key = job
    generator = np.random.Generator(np.random.SFC64(np.random.SeedSequence(key)))
    is_plain = piece.device.type == "cpu" and piece.dtype == torch.float32
    values: Any = piece.numpy() if is_plain else np.empty(len(piece), np.float32)
    generator.standard_normal(out=values, dtype=np.float32)
    values *= np.float32(deviation)
    if not is_plain:
        piece.copy_(torch.from_numpy(values))
