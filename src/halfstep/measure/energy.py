"""Energy of a run from the GPU's own counter (Volta and newer): the whole board, not this process alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from halfstep.measure.nvml import ask_nvml

if TYPE_CHECKING:
    import torch


class EnergyMeter:
    """Joules the device has used since the meter was made."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._start_mj = _counter_mj(device)

    def joules(self) -> float | None:
        """None on a CPU, and where the GPU or its driver does not count."""
        now_mj = _counter_mj(self._device)
        if self._start_mj is None or now_mj is None:
            return None
        return (now_mj - self._start_mj) / 1000


def _counter_mj(device: torch.device) -> int | None:
    return ask_nvml(device, lambda nvml, handle: int(nvml.nvmlDeviceGetTotalEnergyConsumption(handle)))
