"""`fp32_island()`: a region that computes in fp32 whatever the plan says.

Autocast's lists differ between devices: CUDA upcasts softmax, exp, log and sum, the CPU does not, and neither
upcasts an FFT on CUDA. A loss that leans on those lists is right on one device and wrong on another, so every
fragile computation (Dice sums, slot normalisation, Gumbel noise, KL, noise schedules) stands on an island:
autocast off, floating inputs upcast to fp32. Gradients leave the island in the dtype the input came with.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, TypeVar

import torch

T = TypeVar("T")

LOW_PRECISION = (torch.float16, torch.bfloat16)


@contextlib.contextmanager
def fp32_island(device_type: str = "") -> Iterator[None]:
    """Switch autocast off, on the device given or on every one this torch build knows.

    with fp32_island():
        dice = dice_loss(to_fp32(logits), target)
    """
    if device_type:
        with torch.autocast(device_type, enabled=False):
            yield
        return
    # Which device the tensors live on is not known here; switching both off costs two flag writes.
    with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
        yield


def to_fp32(value: T) -> T:
    """Upcast half-precision tensors, also inside tuples, lists and dicts; everything else passes through."""
    if isinstance(value, torch.Tensor):
        return value.float() if value.dtype in LOW_PRECISION else value  # type: ignore[return-value]
    if isinstance(value, dict):
        return type(value)((key, to_fp32(item)) for key, item in value.items())  # type: ignore[call-arg]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(to_fp32(item) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(to_fp32(item) for item in value)  # type: ignore[call-arg]
    return value


def in_fp32(function: Any) -> Any:
    """Decorator: run `function` on an island with its tensor arguments upcast."""
    import functools

    @functools.wraps(function)
    def on_island(*args: Any, **kwargs: Any) -> Any:
        with fp32_island():
            return function(*to_fp32(args), **to_fp32(kwargs))

    return on_island
