"""The one door to NVML. Energy and other processes' memory are extras: without NVML they are unknown, not an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import torch

T = TypeVar("T")


def ask_nvml(device: torch.device, question: Callable[[Any, Any], T]) -> T | None:
    """`question(pynvml, handle)` for this CUDA device; None where NVML, the device or the permission is missing."""
    import torch

    if device.type != "cuda" or torch.version.hip:
        return None
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        # By UUID: CUDA_VISIBLE_DEVICES renumbers torch's devices and not NVML's.
        uuid = torch.cuda.get_device_properties(device).uuid
        return question(pynvml, pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}"))
    except pynvml.NVMLError:
        return None
