"""Captured custom loops on a GPU: Python values and features of hs.Step, bit-equal to eager steps."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import captured_features
import halfstep as hs
import inner_gradients
import python_values
import shared_casts

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
ALIKE = ("Rprop", "Adadelta", "RMSprop")  # bit-equal, the last two while the learning rate stays
OTHERS = {"SGD": {"momentum": 0.9}, "Adam": {}, "AdamW": {}, "Adamax": {}, "NAdam": {}, "RAdam": {}, "ASGD": {}}


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


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("name", shared_casts.CASES)
def test_weights_that_are_used_several_times(name: str, precision: str) -> None:
    if precision == "fp16" and name in ("several_regions", "cast_by_hand"):
        pytest.skip("the case also computes in bf16, which eager autocast cannot mix with fp16")
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        shared_casts.assert_same(name, CUDA, precision)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("name", inner_gradients.CASES)
def test_losses_that_take_a_gradient_themselves(name: str, precision: str) -> None:
    # Autograd adds up gradients in the order in which threads have made nodes: traced code is of one thread.
    with torch.autograd.set_multithreading_enabled(False):
        inner_gradients.assert_same(name, CUDA, precision)


@pytest.mark.parametrize("name", inner_gradients.CASES)
def test_such_losses_with_the_threads_of_autograd(name: str) -> None:
    inner_gradients.assert_close(name, CUDA, "bf16", fast="graph")


@pytest.mark.parametrize("name", inner_gradients.CASES)
def test_compiled_losses_that_take_a_gradient_themselves(name: str) -> None:
    inner_gradients.assert_close(name, CUDA, "bf16")


@pytest.mark.parametrize("is_scheduled", [False, True])
@pytest.mark.parametrize("name", [*ALIKE, *OTHERS])
def test_optimizers_in_the_form_for_graphs(name: str, is_scheduled: bool) -> None:
    """What docs/captured_steps.md says of each: bit-equal to fast="off", or named by the certificate and close."""
    found = []
    for fast in ("off", "graph"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).to(CUDA)
        optimizer = getattr(torch.optim, name)(model.parameters(), lr=1e-2, **OTHERS.get(name, {}))
        rates = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.7) if is_scheduled else None
        schedule = hs.per_epoch(rates) if rates else None
        step = hs.Step(model, optimizer, "fp32", fast=fast, schedule=schedule)  # type: ignore[arg-type]
        batch = torch.randn(6, 4, device=CUDA), torch.randint(0, 3, (6,), device=CUDA)
        for number in range(20):
            step(lambda batch, model=model: F.cross_entropy(model(batch[0]), batch[1]), [batch])
            if is_scheduled and number % 5 == 4:
                step.epoch_ended()
        found.append([parameter.detach() for parameter in model.parameters()])
    assert step.mode == "graph", step._fast.why_eager
    assert (f"; {name} in the form for graphs" in str(step.certificate)) == (name != "Rprop")
    if name == "Rprop" or name in ALIKE and not is_scheduled:
        assert all(map(torch.equal, *found))
    # A few roundings of 20 updates of 1e-2. RAdam's rectification is a root of differences, which fp32 rounds more.
    atol = 5e-5 if name == "RAdam" else 1e-5
    for eager, captured in zip(*found, strict=True):
        torch.testing.assert_close(captured, eager, rtol=1e-4, atol=atol)


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


def test_code_for_autocast_alone_is_compiled_without_a_traceback(capfd: pytest.CaptureFixture[str]) -> None:
    """In fp32, with which compiled code is compared, this code raises: bf16 values meet fp32 weights."""
    torch.manual_seed(0)
    model = captured_features.plain(CUDA).model
    step = hs.Step(model, torch.optim.AdamW(model.parameters(), 1e-2, fused=True), "bf16", fast="compile")
    batch = torch.randn(6, 4, device=CUDA), torch.randint(0, 3, (6,), device=CUDA)
    for _ in range(20):
        step(lambda batch: F.cross_entropy(model(batch[0].to(torch.bfloat16)), batch[1]), [batch])
    assert step.mode.startswith("compile+graph"), step._fast.why_eager
    assert "Traceback" not in capfd.readouterr().err
