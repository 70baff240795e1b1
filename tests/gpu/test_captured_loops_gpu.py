"""Captured custom loops on a GPU: Python values and features of hs.Step, bit-equal to eager steps."""

from __future__ import annotations

import pytest
import torch

import captured_features
import python_values

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")


@pytest.fixture(autouse=True)
def _start_afresh() -> None:
    torch._dynamo.reset()


@pytest.mark.parametrize("name", python_values.CASES)
def test_python_values(name: str) -> None:
    python_values.assert_same(name, CUDA)


@pytest.mark.parametrize("name", captured_features.FEATURES)
def test_features(name: str) -> None:
    captured_features.assert_same(name, CUDA)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("name", ["plain", "accumulated", "average"])
def test_half_precision(name: str, precision: str) -> None:
    captured_features.assert_same(name, CUDA, precision)
