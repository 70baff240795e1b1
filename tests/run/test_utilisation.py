"""The share of a device's peak that a model's own operations take."""

from __future__ import annotations

import dataclasses

import pytest

from halfstep.hardware.gpus import known_gpu
from halfstep.precision.decide import decide
from halfstep.run.pace import peak_flops, utilisation
from halfstep.workloads import KINDS, load


def test_gpt2_124m_at_half_a_million_tokens_a_second_takes_43_percent_of_an_h200() -> None:
    """857 million operations a token, as others count them, of 989 TFLOP/s."""
    config = load("gpt2", overrides=["data.dir=anywhere"]).config
    unit = KINDS["gpt2"].unit_of(config, {"vocab": 50257})
    assert unit.per_sample == 1024
    assert unit.flops_per_sample / 1024 == pytest.approx(857e6, rel=0.01)
    plan = dataclasses.replace(decide("bf16", known_gpu("H200")), device="cuda:0")
    peak = peak_flops(plan)
    assert peak == pytest.approx(989e12, rel=0.01)
    assert utilisation(unit, 500_000 / 1024, peak) == pytest.approx(0.433, abs=0.01)


def test_nothing_is_said_of_a_cpu_or_of_a_model_whose_operations_are_not_counted() -> None:
    plan = dataclasses.replace(decide("fp32", known_gpu("H200")), device="cpu")
    assert peak_flops(plan) is None
    assert utilisation(KINDS["unet"].unit_of(load("unet").config, {}), 10.0, 1e12) is None
