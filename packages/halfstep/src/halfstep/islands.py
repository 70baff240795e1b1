"""`fp32_island()`: a region that computes in fp32 regardless of the plan.

Autocast's lists differ between devices: CUDA upcasts softmax, exp, log and sum, the CPU does not, and no GPU list
upcasts an FFT. A loss that relies on those lists is right on one device and wrong on another, so every fragile
computation (Dice sums, slot normalisation, Gumbel noise, KL, noise schedules) runs on an island: autocast off,
floating inputs upcast to fp32. Gradients leave the island in the dtype the input came with.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")

LOW_PRECISION = (torch.float16, torch.bfloat16)


@contextlib.contextmanager
def fp32_island() -> Iterator[None]:
    """Run the code inside in fp32: autocast is off, on every device. Cast half-precision inputs yourself.

    Example::

        with hs.fp32_island():
            dice = dice_loss(logits.float(), target)
    """
    # Written out, not looped over: torch.compile traces autocast in a `with` statement, not on an ExitStack.
    with (
        torch.autocast("cpu", enabled=False),
        torch.autocast("cuda", enabled=False),
        torch.autocast("mps", enabled=False),
        torch.autocast("xpu", enabled=False),
    ):
        if torch.compiler.is_compiling():
            yield
            return
        _HERE.depth += 1
        try:
            yield
        finally:
            _HERE.depth -= 1


def is_on_island() -> bool:
    """True if this code runs on an island; always False in compiled code."""
    return _HERE.depth > 0


class _Here(threading.local):
    depth = 0


_HERE = _Here()


def to_fp32(value: T) -> T:
    """Upcast half-precision tensors, also inside tuples, lists and dicts; everything else passes through."""
    if isinstance(value, torch.Tensor):
        return value.float() if value.dtype in LOW_PRECISION else value  # type: ignore[return-value]
    if isinstance(value, dict):
        return type(value)((key, to_fp32(item)) for key, item in value.items())
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(to_fp32(item) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(to_fp32(item) for item in value)
    return value


def get_matmul_dtype(x: torch.Tensor) -> torch.dtype:
    """Return the dtype in which matmuls with `x` compute: autocast's if it is on, else that of `x`.

    Meta tensors, on which operations are counted, have no autocast.
    """
    device = x.device.type
    has_autocast = device != "meta" and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if has_autocast else x.dtype


def in_fp32(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate `function` to run in an fp32 island with its tensor arguments upcast."""

    @functools.wraps(function)
    def as_island(*args: P.args, **kwargs: P.kwargs) -> T:
        with fp32_island():
            return function(*to_fp32(args), **to_fp32(kwargs))

    return as_island
