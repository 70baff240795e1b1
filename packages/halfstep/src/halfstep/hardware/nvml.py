"""The only access to NVML. Energy and other processes' memory are extras: without NVML they are unknown, not an error.

Energy comes from the GPU's counter (Volta and newer), which covers the whole board, not only this process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import torch

T = TypeVar("T")


def ask_nvml(device: torch.device, question: Callable[[Any, Any], T]) -> T | None:
    """Call `question(pynvml, handle)` for this CUDA device; None if NVML, the device or the permission is missing."""
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


class EnergyMeter:
    """Joules the device has used since the meter was created."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._start_mj = _read_counter_mj(device)

    def read_joules(self) -> float | None:
        """Return the energy in joules; None on a CPU, or if the GPU or its driver does not count it."""
        now_mj = _read_counter_mj(self._device)
        if self._start_mj is None or now_mj is None:
            return None
        return (now_mj - self._start_mj) / 1000


def _read_counter_mj(device: torch.device) -> int | None:
    return ask_nvml(device, lambda nvml, handle: int(nvml.nvmlDeviceGetTotalEnergyConsumption(handle)))
