"""Loops over chunks that stay out of compiled code, while each of their turns is compiled by itself, once.

A compiler unrolls a loop: that takes minutes, and it fuses what the turns share, so that maps of all chunks are alive
together, which is what chunks are there to prevent.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

Turn = TypeVar("Turn", bound=Callable[..., Any])


def turn_of(function: Turn, *, is_compiled: bool) -> Turn:
    """One turn of a loop, to be called without gradients and with chunks of few shapes."""
    return (_compiled if is_compiled else _plain)(function)


def _plain(function: Any) -> Any:
    """The function itself, in a frame by which the memory plan knows what a compiled step compiles."""

    def run_turn(*inputs: Any, **options: Any) -> Any:
        return function(*inputs, **options)

    return run_turn


TURN = _plain(None).__code__


@functools.cache
def _compiled(function: Any) -> Any:
    return torch.compile(function, dynamic=False)
