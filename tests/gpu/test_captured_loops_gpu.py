"""Captured custom loops on a GPU: Python values and features of hs.Step, bit-equal to eager steps."""

from __future__ import annotations

import pytest
import torch

import captured_features
import halfstep as hs
import python_values

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:.*is not fused")]
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


def test_muon_follows_a_learning_rate_written_by_hand() -> None:
    captured_features.assert_muon_follows_rates(CUDA)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("name", ["plain", "accumulated", "average", "muon"])
def test_half_precision(name: str, precision: str) -> None:
    captured_features.assert_same(name, CUDA, precision)


def test_an_unfused_optimizer_is_captured() -> None:
    torch.manual_seed(0)
    feature = captured_features.plain(CUDA)
    optimizer = torch.optim.AdamW(feature.model.parameters(), 1e-2)
    step = hs.Step(feature.model, optimizer, "fp32", fast="graph")
    batch = torch.randn(6, 4, device=CUDA), torch.randint(0, 3, (6,), device=CUDA)
    outcomes = [step(feature.loss_fn, [batch]) for _ in range(30)]
    assert step.mode == "graph", step._fast.why_eager
    assert outcomes[-1].loss < 0.8 * outcomes[0].loss
    bad = batch[0].clone().fill_(float("nan")), batch[1]
    before = [parameter.clone() for parameter in feature.model.parameters()]
    assert not step(feature.loss_fn, [bad]).committed
    assert all(map(torch.equal, before, feature.model.parameters()))
