"""Weights that a loss uses several times in half precision: captured steps have the bits of eager ones.

tests/gpu has the same on a GPU."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import shared_casts
from halfstep.hardware.device_facts import Hardware
from halfstep.own_loop import step as own_step
from replay_stand_in import replays_on_cpu


@pytest.mark.parametrize("name", shared_casts.CASES)
def test_bits_of_the_eager_step(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    truly = own_step.probe

    def probe(device: str) -> Hardware:
        """Most CPUs emulate bf16, and a plan would fall back to fp32."""
        found = truly(device)
        return dataclasses.replace(found, support={**found.support, "bf16": "native"})

    monkeypatch.setattr(own_step, "probe", probe)
    with replays_on_cpu():
        shared_casts.assert_same(name, torch.device("cpu"))
