"""Every feature of hs.Step in captured steps, with a bad step among them. tests/gpu has the same on a GPU."""

from __future__ import annotations

import pytest
import torch

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
