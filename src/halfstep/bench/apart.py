"""Rows that do not disturb each other, and what could disturb them: switches, memory, compiled code, other users."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch

from halfstep.backend_flags import read_flags, write_flags
from halfstep.errors import format_count
from halfstep.hardware.driver import Driver
from halfstep.hardware.memory import release_unused_memory
from halfstep.hardware.monitor import list_limits
from halfstep.hardware.nvml import ask_nvml
from halfstep.tune.fresh_thread import forget_compiled

CacheState = Literal["", "cold", "warm"]
"""Empty: nothing was compiled."""

OURS = "halfstep."


class CacheWatch:
    """What torch's compiler found on disk since the watch was made; Triton's own cache is not asked."""

    def __init__(self) -> None:
        self._before = _read_cache_counts()

    def found(self) -> CacheState:
        hits, misses = (now - before for now, before in zip(_read_cache_counts(), self._before, strict=True))
        return "cold" if misses else "warm" if hits else ""


def _read_cache_counts() -> tuple[int, int]:
    """Those found in the cache, and those compiled because they were not, or because they cannot be kept."""
    from torch._dynamo.utils import counters

    inductor = counters["inductor"]
    return inductor["fxgraph_cache_hit"], inductor["fxgraph_cache_miss"] + inductor["fxgraph_cache_bypass"]


def forget_our_kernels() -> None:
    """Those of Triton that this process has loaded: the next call looks for them on disk."""
    if "triton" not in sys.modules:
        return
    import torch
    from triton.runtime.jit import JITFunction

    if torch.cuda.is_initialized():
        torch.cuda.synchronize()  # Triton 3.9 takes them off the device
    ours = [module for name, module in list(sys.modules.items()) if name.startswith(OURS)]
    for kernel in (value for module in ours for value in vars(module).values() if isinstance(value, JITFunction)):
        kernel.device_caches.clear()


@contextmanager
def isolate_row(device: torch.device) -> Iterator[None]:
    """A clean device inside; TF32, cuDNN and grad switches are put back on exit, whoever turned them."""
    flags, cudnn = read_flags(), torch.backends.cudnn
    switches = (cudnn.benchmark, cudnn.deterministic, torch.is_grad_enabled())
    clean_device(device)
    try:
        yield
    finally:
        write_flags(flags)
        cudnn.benchmark, cudnn.deterministic = switches[:2]
        torch.set_grad_enabled(switches[2])
        clean_device(device)


def clean_device(device: torch.device) -> None:
    """Nothing compiled, nothing cached, nothing waiting to be freed."""
    # Compiled code keeps weights alive, and dynamo gives up on a function it has compiled eight times.
    forget_compiled()
    forget_our_kernels()
    release_unused_memory(device)


def read_clock_limits(device: torch.device) -> tuple[str, ...]:
    """What holds the GPU's clocks down at this moment; empty where nothing does, or nobody can tell."""

    # The older of its two names: drivers before 535 know no other.
    bits = ask_nvml(device, lambda nvml, handle: int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))) or 0
    return list_limits(bits)


def find_other_users(device: torch.device) -> str:
    """Why others may disturb the measurement, in words; empty where nobody does."""
    driver = Driver()
    if device.type == "cpu":
        load, cores = driver.load(), os.cpu_count() or 1
        return f"the CPU has other work: load {load:.1f} on {format_count(cores, 'core')}" if load > cores else ""
    others = driver.used_by_others(str(device))
    return f"the GPU is in use by others ({others}): times will be too long" if others else ""
