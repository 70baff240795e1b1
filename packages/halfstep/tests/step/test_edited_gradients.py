"""Gradients of the user's own making: a hook edits them before the verdict; behind its back they are refused."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import halfstep as hs
from halfstep.errors import ConfigError, TrainingStopped
from tiny_training import assert_same_bits, batch, everything, loss_of, make_model, poisoned


def made(on_gradients=None, precision: str = "fp32", **more: object) -> hs.Step:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    simulate = precision != "fp32"
    return hs.Step(model, optimizer, hs.Precision(precision, simulate=simulate), on_gradients=on_gradients, **more)


def halve(model: nn.Module) -> None:
    for weight in model.parameters():
        if weight.grad is not None:
            weight.grad.mul_(0.5)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_hook_sees_unscaled_gradients_before_clipping(precision: str, accumulate: int) -> None:
    seen: list[float] = []

    def look(model: nn.Module) -> None:
        seen.append(float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])))

    hooked = made(look, precision, accumulate=accumulate, clip_norm=1e-3)
    plain = made(None, precision, accumulate=accumulate, clip_norm=1e-3)
    window = [batch(k) for k in range(accumulate)]
    norm = plain(loss_of(plain.model), window).reading.grad_norm
    assert hooked(loss_of(hooked.model), window).reading.grad_norm == pytest.approx(norm, rel=1e-5)
    assert seen == pytest.approx([norm], rel=1e-5)
    assert norm > 1e-3


def test_norm_and_clipping_are_of_what_the_hook_left() -> None:
    plain, halved = made(), made(halve)
    norm = plain(loss_of(plain.model), [batch(0)]).reading.grad_norm
    assert halved(loss_of(halved.model), [batch(0)]).reading.grad_norm == pytest.approx(norm / 2, rel=1e-6)


def test_a_hook_that_leaves_a_nan_makes_the_step_bad() -> None:
    def spoil(model: nn.Module) -> None:
        model.head.weight.grad[0, 0] = float("nan")

    step = made(spoil)
    before = everything(step._step)
    outcome = step(loss_of(step.model), [batch(0)])
    assert outcome.reason == "gradient norm is nan"
    assert_same_bits(before, everything(step._step))


def test_a_hook_may_replace_or_drop_gradients() -> None:
    def only_the_head(model: nn.Module) -> None:
        for name, weight in model.named_parameters():
            weight.grad = weight.grad.clone() if name.startswith("head") else None

    step = made(only_the_head)
    before = everything(step._step)
    assert step(loss_of(step.model), [batch(0)]).committed
    after = everything(step._step)
    assert torch.equal(before["model.conv.weight"], after["model.conv.weight"])
    assert not torch.equal(before["model.head.weight"], after["model.head.weight"])


def test_a_hook_that_hides_an_overflow_does_not_hide_it_from_the_loss_scale() -> None:
    def tidy(model: nn.Module) -> None:
        for weight in model.parameters():
            weight.grad.nan_to_num_(0.0, 0.0, 0.0)

    step = made(tidy, "fp16")
    loss_fn = loss_of(step.model)
    assert not step(lambda b: loss_fn(b) * 1e5, [batch(0)]).committed
    assert step.scaler.value.item() == 32768
    without_scaling = made(tidy)
    loss_fn32 = loss_of(without_scaling.model)
    assert without_scaling(lambda b: loss_fn32(b) + 0 * without_scaling.model.head.weight.sum(), [batch(0)]).committed


def test_an_exception_in_the_hook_leaves_no_trace() -> None:
    def breaks(model: nn.Module) -> None:
        raise RuntimeError("hook's own")

    step = made(breaks)
    before = everything(step._step)
    with pytest.raises(RuntimeError, match="hook's own"):
        step(loss_of(step.model), [batch(0)])
    assert_same_bits(before, everything(step._step))


EDITS = {
    "in place": lambda model: model.head.weight.grad.mul_(2),
    "planted": lambda model: model.head.weight.grad.__setitem__((0, 0), float("nan")),
    "replaced": lambda model: setattr(model.head.weight, "grad", torch.zeros_like(model.head.weight)),
    "dropped": lambda model: setattr(model.head.weight, "grad", None),
    "clipped": lambda model: torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3),
}


@pytest.mark.parametrize("edit", sorted(EDITS))
def test_gradients_changed_between_compute_and_commit_are_refused_and_nothing_is_lost(edit: str) -> None:
    step = made()
    loss_fn = loss_of(step.model)
    step(loss_fn, [batch(0)])
    before = everything(step._step)
    facts = step.compute(loss_fn, [batch(1)])
    EDITS[edit](step.model)
    with pytest.raises(ConfigError, match="changed between compute") as refused:
        step.commit(facts)
    assert "on_gradients=" in refused.value.fix
    assert_same_bits(before, everything(step._step))
    assert step.attempted == 1
    assert step(loss_fn, [batch(1)]).committed


def test_looking_at_gradients_between_compute_and_commit_is_allowed() -> None:
    looked, plain = made(), made()
    facts = looked.compute(loss_of(looked.model), [batch(0)])
    assert all(bool(weight.grad.isfinite().all()) for weight in looked.model.parameters())
    looked.commit(facts)
    plain(loss_of(plain.model), [batch(0)])
    assert_same_bits(everything(plain._step), everything(looked._step))


def test_the_guard_sees_steps_made_by_compute_and_commit() -> None:
    step = made()
    for _ in range(6):
        step.commit(step.compute(loss_of(step.model), [poisoned()]))
    facts = step.compute(loss_of(step.model), [poisoned()])
    with pytest.raises(TrainingStopped, match="5 bad steps in a row") as stopped:
        step.commit(facts)
    assert "clip_norm" in stopped.value.fix


def test_facts_that_are_not_committed_yet_cannot_be_read() -> None:
    step = made()
    facts = step.compute(loss_of(step.model), [batch(0)])
    with pytest.raises(ConfigError, match="cannot be read yet") as refused:
        facts.read()
    assert "step.commit(facts)" in refused.value.fix
    step.commit(facts)
    assert not facts.read().is_bad


def test_facts_are_committed_once_and_only_those_of_the_last_compute() -> None:
    seen: list[int] = []
    step = made(on_outcome=lambda outcome: seen.append(outcome.step))
    first = step.compute(loss_of(step.model), [batch(0)])
    second = step.compute(loss_of(step.model), [poisoned()])
    before = everything(step._step)
    with pytest.raises(ConfigError, match="facts of the last compute"):
        step.commit(first)
    assert_same_bits(before, everything(step._step))
    step.commit(second)
    with pytest.raises(ConfigError, match="facts of the last compute"):
        step.commit(second)
    step.finish()
    assert seen == [0]
    assert step.attempted == 1


class NeedsClosure(torch.optim.SGD):
    def step(self, closure=None):
        assert closure is not None, "Sharpness Aware Minimization requires closure"


class NeedsClosureByName(torch.optim.SGD):
    def step(self, closure):
        closure()


@pytest.mark.parametrize(
    ("kind", "error", "text"),
    [
        (NeedsClosure, AssertionError, "Sharpness Aware Minimization requires closure"),
        (NeedsClosureByName, ConfigError, "NeedsClosureByName needs a closure"),
    ],
)
def test_an_optimizer_that_needs_a_closure_ends_with_an_error_and_changes_nothing(
    kind: type, error: type[Exception], text: str
) -> None:
    model = make_model()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(error, match=text):
        hs.Step(model, kind(model.parameters(), lr=0.1), "fp32")(loss_of(model), [batch(0)])
    assert_same_bits(before, model.state_dict())
