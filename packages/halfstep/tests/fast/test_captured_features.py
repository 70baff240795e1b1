"""Captured steps with every feature of hs.Step and a bad step among them, and with Python values of every kind, which
they follow exactly unless they name the reason why they are not captured. tests/gpu has the same on a GPU."""

from __future__ import annotations

import pytest
import torch

import python_values
from captured_features import FEATURES, assert_muon_follows_rates, assert_same
from replay_stand_in import replays_on_cpu


@pytest.mark.filterwarnings("ignore:.*is not fused")
@pytest.mark.parametrize("name", FEATURES)
def test_feature_in_captured_steps(name: str) -> None:
    with replays_on_cpu():
        assert_same(name, torch.device("cpu"))


def test_muon_follows_a_learning_rate_written_by_hand() -> None:
    with replays_on_cpu():
        assert_muon_follows_rates(torch.device("cpu"))


@pytest.mark.parametrize("name", python_values.CASES)
def test_captured_steps_follow_python_values(name: str) -> None:
    with replays_on_cpu():
        python_values.assert_same(name, torch.device("cpu"))
