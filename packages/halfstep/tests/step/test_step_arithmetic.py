"""What a good step computes: bit-equal to plain PyTorch, and exact weighting where plain loops are wrong."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np
import pytest
import torch

from halfstep.errors import ConfigError, DataError
from halfstep.step.clip import Clip
from halfstep.step.commit import step_muon
from halfstep.step.optim.by_name import build_optimizer, make_parameter_groups
from halfstep.step.randomness import seed_everything
from halfstep.step.step import GuardedStep, count_samples
from tiny_training import assert_same_bits, batch, everything, loss_of, make_model, make_step, plan


def test_plain_training_is_bit_equal_to_a_hand_written_loop() -> None:
    model = make_model()
    reference = copy.deepcopy(model)
    step = GuardedStep(model, torch.optim.AdamW(model.parameters(), fused=True), plan(), clip=Clip(limit=0.5))
    optimizer = torch.optim.AdamW(reference.parameters(), fused=True)
    for k in range(5):
        step(loss_of(model), [batch(k)])
        optimizer.zero_grad()
        loss_of(reference)(batch(k)).backward()
        torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        optimizer.step()
    assert_same_bits(model.state_dict(), reference.state_dict())


def test_fp16_unscales_before_clipping() -> None:
    """The classic mistake: clipping scaled gradients makes the step 65536 times too small."""
    steps = {name: make_step("sgd", name, clip=Clip(limit=0.1), ema=False) for name in ("fp32", "fp16")}
    norms = {name: s(loss_of(s.model), [batch(0)]).read().grad_norm for name, s in steps.items()}
    assert norms["fp16"] == pytest.approx(norms["fp32"], rel=5e-3)  # fp16 has 11 bits
    moved = [(s.model.head.weight - make_model().head.weight).norm().item() for s in steps.values()]
    assert moved[1] == pytest.approx(moved[0], rel=5e-3)


@pytest.mark.parametrize(("kind", "norm"), [("l2", 2.0), ("inf", float("inf"))])
def test_clipping_by_norm_equals_torchs_also_of_scaled_gradients(kind: str, norm: float) -> None:
    gradients = [torch.randn(5, 3), torch.randn(7) * 10]
    parameters = [torch.nn.Parameter(torch.zeros_like(g)) for g in gradients]
    for p, g in zip(parameters, gradients, strict=True):
        p.grad = g.clone()
    expected_norm = torch.nn.utils.clip_grad_norm_(parameters, 0.3, norm_type=norm)
    found, share = Clip(limit=0.3, kind=kind).measure(gradients)
    assert torch.equal(found, expected_norm)
    assert all(torch.equal(g * share, p.grad) for g, p in zip(gradients, parameters, strict=True))
    assert Clip().measure(gradients)[1] is None
    # A power of two changes no bit, and one factor both unscales and clips.
    scaled_norm, factor = Clip(limit=0.3, kind=kind).measure([g * 1024 for g in gradients], torch.tensor(1 / 1024))
    assert torch.equal(scaled_norm, found)
    assert all(torch.equal(g * 1024 * factor, g * share) for g in gradients)


def test_clipping_by_value_limits_every_unscaled_entry() -> None:
    gradients = [torch.tensor([-6.0, 0.2, 10.0])]
    norm, factor = Clip(limit=0.5, kind="value").measure(gradients, torch.tensor(0.5))
    assert factor is None
    assert norm.item() == pytest.approx((9 + 0.01 + 25) ** 0.5)
    assert gradients[0].tolist() == pytest.approx([-0.5, 0.1, 0.5])


def test_windows_keep_the_last_partial_group() -> None:
    step = make_step(accumulate=3)
    assert [len(window) for window in step.windows(range(8))] == [3, 3, 2]


def test_a_window_of_unequal_batches_weighs_them_by_their_samples() -> None:
    """The mean over all samples, as if they had been one batch; the mean of means would be wrong."""
    model = torch.nn.Linear(3, 1)
    whole = copy.deepcopy(model)
    data = torch.randn(7, 3, generator=torch.Generator().manual_seed(0))
    sgd = {"lr": 1.0, "fused": True}
    step = GuardedStep(model, torch.optim.SGD(model.parameters(), **sgd), plan(), accumulate=3)
    facts = step(lambda x: model(x).square().mean(), [data[:4], data[4:6], data[6:]])
    single = GuardedStep(whole, torch.optim.SGD(whole.parameters(), **sgd), plan())
    one = single(lambda x: whole(x).square().mean(), [data])
    assert facts.read().loss == pytest.approx(one.read().loss, rel=1e-6)
    torch.testing.assert_close(model.weight, whole.weight, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("as_tensor", [False, True])
def test_a_loss_may_bring_its_own_weight(as_tensor: bool) -> None:
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    step = GuardedStep(model, torch.optim.SGD(model.parameters(), lr=1.0, fused=True), plan(), accumulate=2)
    tokens = {1.0: 3, 2.0: 1}

    def loss_fn(x: torch.Tensor):
        weight = tokens[x.item()]
        return model(x).mean(), torch.tensor(weight) if as_tensor else weight

    facts = step(loss_fn, [torch.tensor([[1.0]]), torch.tensor([[2.0]])])
    assert facts.read().loss == pytest.approx((3 * 1.0 + 1 * 2.0) / 4)
    assert model.weight.item() == pytest.approx(1 - (3 * 1.0 + 1 * 2.0) / 4)


@pytest.mark.parametrize("as_tensor", [False, True])
def test_a_window_of_weight_zero_is_an_empty_skip(as_tensor: bool) -> None:
    step = make_step()
    loss_fn = loss_of(step.model)
    zero = torch.tensor(0.0) if as_tensor else 0
    reading = step(lambda b: (loss_fn(b), zero), [batch(0)]).read()
    assert reading.is_bad
    assert reading.is_empty
    assert reading.reason == "empty window"
    assert reading.committed == 0


def test_facts_name_their_samples() -> None:
    step = make_step(accumulate=2)
    reading = step(loss_of(step.model), [batch(1), batch(2)]).read()
    assert reading.sample_ids == (100, 101, 102, 103, 200, 201, 202, 203)


def test_half_stored_weights_are_refused_with_the_reason() -> None:
    model = torch.nn.Linear(2, 2).half()
    with pytest.raises(ConfigError, match="stored in fp16"):
        GuardedStep(model, torch.optim.SGD(model.parameters(), lr=0.1), plan("fp16"))


def test_an_unknown_optimizer_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="adamw"):
        build_optimizer("adamww", make_parameter_groups(make_model(), 0.0), lr=0.1)


def test_norms_and_biases_do_not_decay_unless_asked() -> None:
    decayed, plain = make_parameter_groups(make_model(), 0.1)
    assert all(p.ndim > 1 for p in decayed["params"])
    assert plain["weight_decay"] == 0.0
    assert len(make_parameter_groups(make_model(), 0.1, decay_all=True)) == 1


def test_a_batch_without_tensors_asks_for_a_weight() -> None:
    assert count_samples({"text": ["a"], "image": torch.zeros(3, 2)}) == 3
    with pytest.raises(DataError, match="how many samples"):
        count_samples({"text": "a"})


def test_spikes_are_reported_and_skipped_only_on_request() -> None:
    from halfstep.step.guard import SpikeMeter

    for skips in (False, True):
        step = make_step(spikes=SpikeMeter(torch.device("cpu"), size=8, threshold=8.0, skips=skips))
        loss_fn = loss_of(step.model)
        for k in range(10):
            assert not step(loss_fn, [batch(k)]).read().is_spike
        reading = step(lambda b, f=loss_fn: f(b) * 100, [batch(11)]).read()
        assert reading.is_spike
        assert reading.is_bad is skips
        assert reading.committed == (10 if skips else 11)


def test_a_step_that_broke_off_is_abandoned_without_a_trace() -> None:
    step = make_step()
    loss_fn = loss_of(step.model)
    step(loss_fn, [batch(0)])
    before, draws = everything(step), torch.get_rng_state()

    def breaks_off(b):
        loss = loss_fn(b) + torch.rand(())
        raise MemoryError(loss)

    with pytest.raises(MemoryError):
        step.compute(breaks_off, [batch(1)])
    step.abandon()
    assert_same_bits(before, everything(step))
    assert torch.equal(draws, torch.get_rng_state())
    assert not any(p.grad is not None for p in step.model.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("settings", [{}, {"nesterov": False, "adjust_lr_fn": "match_rms_adamw"}])
def test_muon_with_a_rate_on_the_device_is_a_rounding_away_from_torchs(dtype: torch.dtype, settings: Any) -> None:
    torch.manual_seed(0)
    start = torch.randn(6, 4).to(dtype)
    weights = [torch.nn.Parameter(start.clone()) for _ in range(2)]
    plain, ours = (torch.optim.Muon([w], lr=0.01, weight_decay=0.1, **settings) for w in weights)
    ours.param_groups[0]["lr"] = torch.tensor(0.01)
    for k in range(3):
        for weight in weights:
            weight.grad = torch.randn(6, 4, generator=torch.Generator().manual_seed(k)).to(dtype)
        plain.step()
        with torch.no_grad():
            step_muon(ours)
    # torch rounds bf16 weights twice per step, and its Muon without nesterov divides a bf16 momentum in place.
    assert (weights[1] - weights[0]).norm() <= 2 * torch.finfo(dtype).eps * weights[0].norm()


def test_seeding_repeats_the_numbers_of_all_global_generators() -> None:
    drawn = []
    for _ in range(2):
        seed_everything(3)
        drawn.append((random.random(), np.random.rand(), torch.rand(()).item()))
    assert drawn[0] == drawn[1]
