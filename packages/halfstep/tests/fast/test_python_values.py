"""Captured steps follow Python values exactly, or are not captured and name the reason. tests/gpu has the same."""

from __future__ import annotations

import pytest
import torch

from python_values import CASES, assert_same
from replay_stand_in import replays_on_cpu


@pytest.mark.parametrize("name", CASES)
def test_captured_steps_follow_python_values(name: str) -> None:
    with replays_on_cpu():
        assert_same(name, torch.device("cpu"))
