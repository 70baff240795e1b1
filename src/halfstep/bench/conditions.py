"""What makes a measurement worth less: another user on the GPU, clocks held down, a loaded CPU."""

from __future__ import annotations

import os

import torch

from halfstep.errors import counted
from halfstep.hardware.driver import Driver
from halfstep.measure.monitor import limits_in
from halfstep.measure.nvml import ask_nvml


def clock_limits(device: torch.device) -> tuple[str, ...]:
    """What holds the GPU's clocks down at this moment; empty where nothing does, or nobody can tell."""

    # The older of its two names: drivers before 535 know no other.
    bits = ask_nvml(device, lambda nvml, handle: int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))) or 0
    return limits_in(bits)


def shared_with(device: torch.device, driver: Driver | None = None) -> str:
    """Why others may disturb the measurement, in words; empty where nobody does."""
    driver = driver or Driver()
    if device.type == "cpu":
        load, cores = driver.load(), os.cpu_count() or 1
        return f"the CPU has other work: load {load:.1f} on {counted(cores, 'core')}" if load > cores else ""
    others = driver.used_by_others(str(device))
    return f"the GPU is in use by others ({others}): times will be too long" if others else ""
