"""Peak memory of a run, and a description of memory use for out-of-memory errors."""

from __future__ import annotations

import gc
import os
import re
import sys
import weakref
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from halfstep.errors import format_bytes

PROCESS_MEMORY = Path("/proc/self/status")
MACHINE_MEMORY = Path("/proc/meminfo")
CLEAR_REFS = Path("/proc/self/clear_refs")


def get_peak_memory_bytes(device: torch.device) -> int | None:
    """Return the peak memory since `reset_peak`: torch's on a GPU, the process's on a CPU; None if not counted."""
    if device.type == "cuda":
        in_graphs = torch.cuda.memory_allocated(device) + _count_idle_graph_bytes(device)
        return max(torch.cuda.max_memory_allocated(device), in_graphs)
    if device.type == "xpu":
        return torch.xpu.max_memory_allocated(device)
    return _read_peak_resident_bytes() if device.type == "cpu" else None


def reset_peak(device: torch.device) -> None:
    """Reset the peak; on a CPU without Linux' /proc it stays the peak since the process started."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif device.type == "xpu":
        torch.xpu.reset_peak_memory_stats(device)
    elif device.type == "cpu" and os.access(CLEAR_REFS, os.W_OK):
        CLEAR_REFS.write_text("5")  # 5 resets the peak resident size (man proc_pid_clear_refs)


def release_unused_memory(device: torch.device) -> None:
    """Collect garbage, clear cuBLAS workspaces and return cached memory to the driver.

    Each stream and thread that ran a matmul keeps a workspace (34 MB on an H200) until the process ends; one that was
    used in a graph capture keeps the rest of that graph's memory alive.
    """
    gc.collect()
    if device.type == "cuda":
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
    elif device.type == "xpu":
        torch.xpu.empty_cache()


def describe_memory(device: torch.device) -> str:
    """Return one fact per line, for an out-of-memory error."""
    if device.type == "cuda":
        return "\n".join(_describe_cuda_memory(device))
    facts = {"total on this machine": _read_kibibytes(MACHINE_MEMORY, "MemTotal")}
    facts |= {
        "available": _read_kibibytes(MACHINE_MEMORY, "MemAvailable"),
        "peak of this run": get_peak_memory_bytes(device),
    }
    known = [f"{name}: {format_bytes(size)}" for name, size in facts.items() if size is not None]
    return "\n".join(known) or f"{device} does not report its memory"


def _describe_cuda_memory(device: torch.device) -> list[str]:
    free, total = torch.cuda.mem_get_info(device)
    allocated, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    peak, others = torch.cuda.max_memory_allocated(device), max(total - free - reserved, 0)
    return [
        f"total on {torch.cuda.get_device_name(device)}: {format_bytes(total)}, free: {format_bytes(free)}",
        f"in torch's tensors: {format_bytes(allocated)}, at most {format_bytes(peak)}",
        f"reserved by torch and empty: {format_bytes(reserved - allocated)}",
        f"everything else (CUDA context, other processes): {format_bytes(others)}",
    ]


def _count_idle_graph_bytes(device: torch.device) -> int:
    """Return the memory held by captured CUDA graphs: replays write into it, although torch counts it as free."""
    index = torch.cuda.current_device() if device.index is None else device.index
    return sum(
        segment["total_size"] - segment["allocated_size"]
        for segment in torch.cuda.memory_snapshot()
        # (0, 0) is the default pool; every graph's pool has its own id.
        if segment["device"] == index and tuple(segment["segment_pool_id"]) != (0, 0)
    )


def _read_peak_resident_bytes() -> int | None:
    # Not ru_maxrss first: it survives exec, so a child of a big process would report its parent's peak.
    if (peak := _read_kibibytes(PROCESS_MEMORY, "VmHWM")) is not None:
        return peak
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # kibibytes everywhere but on macOS


def _read_kibibytes(file: Path, name: str) -> int | None:
    """Read a `Name:  123 kB` line of Linux' /proc, in bytes; None on other systems."""
    found = re.search(rf"^{name}:\s+(\d+) kB$", file.read_text(), re.MULTILINE) if file.exists() else None
    return int(found.group(1)) * 1024 if found else None


class LiveBytes(TorchDispatchMode):
    """Count the live bytes of all storages created inside, and their peak: for devices that keep no such count."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._alive: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, Tensor):
                self._note(value.untyped_storage())
        return result

    def _note(self, storage: torch.UntypedStorage) -> None:
        address = storage._cdata
        if address in self._alive:
            return
        self._alive.add(address)
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._forget, address, storage.nbytes())

    def _forget(self, address: int, num_bytes: int) -> None:
        self._alive.discard(address)
        self.now -= num_bytes
