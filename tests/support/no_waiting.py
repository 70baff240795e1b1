"""A region in which any wait of the host for the GPU is an error."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def no_host_wait() -> Iterator[None]:
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        # torch announces that its detector is a prototype; as an error that would leave the detector switched on.
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
