"""A peer runs as if alone in its process, and leaves no trace in ours.

What every row needs, `apart` does: backend flags, memory and compiled code. Frameworks do more: they print and warn,
install signal handlers, set environment variables and draw random numbers.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import warnings
from collections.abc import Iterator

import torch
from torch._dynamo import config as dynamo_config

from halfstep.bench.apart import apart
from halfstep.kernels.fast_forms import forced
from halfstep.precision.backend import fp32_mode

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextlib.contextmanager
def isolated(device: torch.device) -> Iterator[None]:
    """Quiet and with nothing compiled; flags, seeds, environment and signal handlers are put back on exit."""
    on_cuda = device.type == "cuda"
    with (
        quiet(),
        apart(device),
        _environment_put_back(),
        _signals_put_back(),
        torch.random.fork_rng(devices=[device] if on_cuda else []),
        torch.cuda.device(device) if on_cuda else contextlib.nullcontext(),
        # A peer that silently stopped being compiled would be timed as something it is not.
        dynamo_config.patch(fail_on_recompile_limit_hit=True),
        # Our models would compute in our own fast forms: a peer's user writes torch's layers.
        forced(False),
    ):
        yield


@contextlib.contextmanager
def float32_as_asked(precision: str, *, by_hand: bool) -> Iterator[None]:
    """`fp32` is strict and `tf32` is not; beside bf16 or fp16, TF32 is on for those who know of it, else as found."""
    if precision in ("fp32", "tf32") or by_hand:
        with fp32_mode("ieee" if precision == "fp32" else "tf32"):
            yield
    else:
        yield


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """No warnings and no log lines below errors."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)


@contextlib.contextmanager
def _environment_put_back() -> Iterator[None]:
    before = dict(os.environ)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


@contextlib.contextmanager
def _signals_put_back() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield  # Python lets only the main thread set handlers, so nobody else could have
        return
    before = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
