"""Recurrent layers while simulating: in parts, matmul by matmul, so that every product is rounded as simulated.

On CUDA cuDNN runs nn.LSTM, nn.GRU and nn.RNN whole in half: weights, inputs, states and outputs. So do they here, in
the format declared; CUDA autocast takes fp16 for them even where it is bf16 (docs/precision.md).

The CPU's fused kernel (oneDNN) is no help: it lacks these formats on most CPUs, and in tf32 it would compute in plain
fp32. torch's own decomposition takes its place; it also rounds between the operations inside a cell, where cuDNN keeps
fp32.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from halfstep.precision.autocast_lists import RECURRENT


@contextlib.contextmanager
def without_onednn() -> Iterator[None]:
    """torch's recurrent layers are one kernel of oneDNN, or parts where that is switched off."""
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


def in_parts(op: Any) -> Callable[..., Any]:
    """The layer as its decomposition, each part of which autograd and the simulated kernels see."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with without_onednn():
            return op.decompose(*args, **kwargs)

    return kernel


def is_recurrent(op: Any) -> bool:
    return str(op).removeprefix("aten.") in RECURRENT
