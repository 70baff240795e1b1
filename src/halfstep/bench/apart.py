"""Rows that do not disturb each other: memory, compiled code and the process's switches are as before each one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from halfstep.bench.compile_cache import forget_our_kernels
from halfstep.measure.memory import give_back
from halfstep.precision.backend import read_flags, write_flags
from halfstep.tune.compiler_threads import forget_compiled


@contextmanager
def apart(device: torch.device) -> Iterator[None]:
    """A clean device inside; TF32, cuDNN and grad switches are put back on exit, whoever turned them."""
    flags, cudnn = read_flags(), torch.backends.cudnn
    switches = (cudnn.benchmark, cudnn.deterministic, torch.is_grad_enabled())
    clean(device)
    try:
        yield
    finally:
        write_flags(flags)
        cudnn.benchmark, cudnn.deterministic = switches[:2]
        torch.set_grad_enabled(switches[2])
        clean(device)


def clean(device: torch.device) -> None:
    """Nothing compiled, nothing cached, nothing waiting to be freed."""
    # Compiled code keeps weights alive, and dynamo gives up on a function it has compiled eight times.
    forget_compiled()
    forget_our_kernels()
    give_back(device)
