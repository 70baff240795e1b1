"""Gradients of weights on a second stream: nobody waits for them, and they multiply while others move bytes.

A convolution's weight gradient is bound by arithmetic, BatchNorm's backward by memory. Side by side, each fills what
the other leaves idle: the end of a grid, the gap before a small kernel. A transformer lost time by it and does without
(docs/log.md).

What the second stream reads must stay alive until it is done. So its work ends where the block does that began it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from types import TracebackType
from typing import Self

import torch
from torch import Tensor


class SideStream:
    """A block whose `aside()` parts run on a second stream, behind all that was asked for before them.

    The end of the block waits for them, as the device waits and not the host. On the CPU all runs in order.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream = _second_stream(device) if device.type == "cuda" else None
        self._is_used = False
        self._kept: list[Tensor] = []

    def __enter__(self) -> Self:
        return self

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        if self.stream is None:
            yield
            return
        self._is_used = True
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        with torch.cuda.stream(self.stream):
            yield

    def keep(self, tensor: Tensor) -> None:
        """Until the block ends: a part put aside reads it, and whoever made it may let go of it before."""
        self._kept.append(tensor)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # A capture must not wait for a stream that has no part in it yet: that breaks it.
        if self.stream is not None and self._is_used:
            torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)
        self._kept.clear()


@functools.cache
def _second_stream(device: torch.device) -> torch.cuda.Stream:
    # torch hands out 32 streams of a priority in turn. The loader's has the usual one and must not be this one: a copy
    # on this stream, while a step is captured, would be captured with it.
    return torch.cuda.Stream(device, priority=-1)
