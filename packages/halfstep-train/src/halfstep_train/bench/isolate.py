"""Isolate benchmark rows: reset flags, memory and compiled code, and detect other users of the device."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch

from halfstep.backend_flags import read_flags, write_flags
from halfstep.hardware.driver import Driver
from halfstep.hardware.memory import release_unused_memory
from halfstep.hardware.monitor import list_limits
from halfstep.hardware.nvml import ask_nvml
from halfstep_train.tune.fresh_thread import forget_compiled

CacheState = Literal["", "cold", "warm"]
"""Whether compiled code came from the cache; empty if nothing was compiled."""

OURS = ("halfstep.", "halfstep_train.")


class CacheWatch:
    """Reports whether torch's compiler hit its disk cache since the watch was made; ignores Triton's own cache."""

    def __init__(self) -> None:
        self._before = _read_cache_counts()

    def get_state(self) -> CacheState:
        hits, misses = (now - before for now, before in zip(_read_cache_counts(), self._before, strict=True))
        return "cold" if misses else "warm" if hits else ""


def _read_cache_counts() -> tuple[int, int]:
    """Return the number of cache hits, and of compilations because of a miss or because the graph cannot be cached."""
    from torch._dynamo.utils import counters

    inductor = counters["inductor"]
    return inductor["fxgraph_cache_hit"], inductor["fxgraph_cache_miss"] + inductor["fxgraph_cache_bypass"]


def forget_our_kernels() -> None:
    """Unload halfstep's Triton kernels, so that the next call looks for them on disk."""
    if "triton" not in sys.modules:
        return
    import torch
    from triton.runtime.jit import JITFunction

    if torch.cuda.is_initialized():
        torch.cuda.synchronize()  # Triton 3.9 unloads them from the device, where they may still be running
    ours = [module for name, module in list(sys.modules.items()) if name.startswith(OURS)]
    for kernel in (value for module in ours for value in vars(module).values() if isinstance(value, JITFunction)):
        kernel.device_caches.clear()


@contextmanager
def isolate_row(device: torch.device) -> Iterator[None]:
    """Isolate a row: clean the device before and after, and restore the TF32, cuDNN and grad flags on exit."""
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
    """Drop compiled code, cached memory and garbage."""
    # Compiled code keeps weights alive, and dynamo gives up on a function it has compiled eight times.
    forget_compiled()
    forget_our_kernels()
    release_unused_memory(device)


def read_clock_limits(device: torch.device) -> tuple[str, ...]:
    """Return what limits the GPU's clocks at this moment; empty if nothing does, or NVML is missing."""

    # The older of the function's two names: drivers before 535 lack the other.
    bits = ask_nvml(device, lambda nvml, handle: int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))) or 0
    return list_limits(bits)


def find_other_users(device: torch.device) -> str:
    """Describe other work on the device that may disturb the measurement; empty if there is none."""
    if device.type == "cpu":
        return Driver().describe_load()
    others = Driver().describe_gpu_users(str(device))
    return f"{others}: times will be too long" if others else ""
