from __future__ import annotations

import torch

from halfstep.hardware.nvml import EnergyMeter


def test_a_cpu_has_no_energy_counter() -> None:
    assert EnergyMeter(torch.device("cpu")).read_joules() is None
