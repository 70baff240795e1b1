"""A bad step changes nothing: every optimizer, every precision, the first step, a middle one, two in a row."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import halfstep as hs
from halfstep.errors import CheckpointError, ConfigError
from halfstep.step.optim.by_name import OPTIMIZERS
from tiny_training import assert_same_bits, batch, everything, loss_of, make_model, make_step, poisoned

PRECISIONS = ("fp32", "tf32", "bf16", "fp16")


def run(step, loss_fn, batches) -> list:
    readings = []
    for one in batches:
        facts = step(loss_fn, [one])
        readings.append(facts.read())
    return readings


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("optimizer", sorted(OPTIMIZERS))
@pytest.mark.parametrize("good_before", [0, 3], ids=["first", "middle"])
def test_two_bad_steps_in_a_row_leave_every_bit_alone(optimizer: str, precision: str, good_before: int) -> None:
    step = make_step(optimizer, precision)
    loss_fn = loss_of(step.model)
    readings = run(step, loss_fn, [batch(i) for i in range(good_before)])
    assert not any(r.is_bad for r in readings)
    before = everything(step)
    for _ in range(2):
        facts = step(loss_fn, [poisoned()])
        assert facts.read().is_bad
        assert_same_bits(before, everything(step))
    assert step.attempted == good_before + 2
    after = run(step, loss_fn, [batch(50)])
    assert not after[0].is_bad
    assert after[0].committed == good_before + 1


@pytest.mark.parametrize("optimizer", sorted(OPTIMIZERS))
def test_training_goes_on_as_if_the_bad_batch_had_never_come(optimizer: str) -> None:
    clean, dirty = make_step(optimizer), make_step(optimizer)
    good = [batch(i) for i in range(6)]
    run(clean, loss_of(clean.model), good)
    run(dirty, loss_of(dirty.model), [poisoned(), *good[:3], poisoned(), poisoned(), *good[3:]])
    assert_same_bits(everything(clean), everything(dirty))


def test_a_statistic_that_overflows_behind_a_finite_loss_is_a_bad_step_too() -> None:
    step = make_step()
    loss_fn = loss_of(step.model)
    step(loss_fn, [batch(0)])
    before = everything(step)
    huge = batch(1)
    huge["image"] = huge["image"] * 1e30  # the variance passes 3e38, the normalised activations are zero
    reading = step(loss_fn, [huge]).read()
    assert torch.isfinite(torch.tensor([reading.loss, reading.grad_norm])).all()
    assert reading.reason == "a buffer (BatchNorm statistics) is not finite"
    assert_same_bits(before, everything(step))


def test_a_mask_buffer_of_minus_infinity_is_no_fault() -> None:
    step = make_step()
    step.model.register_buffer("mask", torch.full((2, 2), float("-inf")))
    step = type(step)(step.model, step.optimizers, step.plan)
    assert not step(loss_of(step.model), [batch(0)]).read().is_bad


def test_several_optimizers_share_one_verdict() -> None:
    step = make_step()
    model = copy.deepcopy(step.model)
    body = torch.optim.SGD([*model.conv.parameters(), *model.norm.parameters()], lr=0.1, momentum=0.9)
    head = torch.optim.AdamW(model.head.parameters(), lr=0.1, fused=True)
    both = type(step)(model, [body, head], step.plan)
    loss_fn = loss_of(model)
    run(both, loss_fn, [batch(0)])
    before = everything(both)
    # The fault is in the head's gradient only; the body must not move either.
    reading = run(both, lambda b: loss_fn(b) + model.head.weight.sum() * float("nan"), [batch(1)])[0]
    assert reading.is_bad
    assert_same_bits(before, everything(both))


# --- stored state is put back whole, or refused with everything as it was ---


def made(precision: str = "fp32", *, model: nn.Module | None = None, steps: int = 0, **more: Any) -> hs.Step:
    model = model or make_model()
    optimizer = more.pop("optimizer", lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True))
    more.setdefault("schedule", lambda k: 1 / (k + 1))
    step = hs.Step(model, optimizer(model.parameters()), hs.Precision(precision, simulate=precision != "fp32"), **more)
    for k in range(steps):
        step(loss_of(model), [batch(k)])
    return step


def trained_state(*args: Any, **more: Any) -> dict[str, Any]:
    return copy.deepcopy(made(*args, steps=3, **more).state_dict())


def without(state: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in state.items() if key not in keys}


def wider() -> nn.Module:
    model = make_model()
    model.head = nn.Linear(4, 5)
    return model


def two_optimizers(p: Any) -> list[torch.optim.Optimizer]:
    weights = list(p)
    return [torch.optim.AdamW(part, fused=True) for part in (weights[:2], weights[2:])]


UNFIT: dict[str, tuple[str, Any]] = {
    "of another precision": ("with loss scaling", lambda: trained_state("fp16")),
    "empty": ("lacks attempted", dict),
    "of an optimizer": (r"state, param_groups\) is not the state of a step", lambda: trained_state()["optimizers"][0]),
    "a list": ("this list", list),
    "of an older kind": ("lacks spikes", lambda: without(trained_state(), "spikes")),
    "with an average": ("the checkpoint has an average", lambda: trained_state(ema_decay=0.9)),
    "of two optimizers": ("contains 2 optimizers", lambda: trained_state(optimizer=two_optimizers)),
    "of SGD": ("another optimizer than AdamW", lambda: trained_state(optimizer=lambda p: torch.optim.SGD(p, 0.1))),
    "of another shape": ("shape", lambda: trained_state(model=wider())),
    "of fewer parameters": ("parameters", lambda: trained_state(optimizer=lambda p: torch.optim.AdamW(list(p)[:3]))),
    "without its guard": ("lacks pending", lambda: without(trained_state(), "guard")),
}


@pytest.mark.parametrize("kind", sorted(UNFIT))
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(kind: str) -> None:
    words, state = UNFIT[kind]
    step = made(steps=2)
    for _ in range(1):
        step(loss_of(step.model), [poisoned()])
    before, stored = everything(step._step), copy.deepcopy(step.state_dict())
    with pytest.raises(CheckpointError, match=words) as refused:
        step.load_state_dict(state())
    assert refused.value.fix
    assert_same_bits(before, everything(step._step))
    after = step.state_dict()
    assert (step.attempted, after["scaler"]) == (3, stored["scaler"])
    assert repr(after["guard"]) == repr(stored["guard"]), "compared as text: a NaN equals nothing"
    assert step.optimizers[0].param_groups[0]["lr"] == pytest.approx(stored["optimizers"][0]["param_groups"][0]["lr"])
    assert step(loss_of(step.model), [batch(5)]).committed


def test_an_average_and_a_scale_that_are_missing_are_refused() -> None:
    with pytest.raises(CheckpointError, match="without loss scaling"):
        made("fp16").load_state_dict(trained_state())
    averaged = made(ema_decay=0.9)
    with pytest.raises(CheckpointError, match="this step has an average of the weights, but the checkpoint has none"):
        averaged.load_state_dict(trained_state())
    assert averaged.attempted == 0
    state = trained_state(ema_decay=0.9)
    state["ema"]["head.weight"] = torch.zeros(9, 9)
    with pytest.raises(CheckpointError, match=r"head\.weight does not fit: shape \(9, 9\)"):
        averaged.load_state_dict(state)


def test_a_schedule_that_has_ended_before_the_stored_step_is_refused_whole() -> None:
    rates = [1.0, 0.5]
    short = made(schedule=lambda k: rates[k])
    with pytest.raises(ConfigError, match="no learning rate for step"):
        short.load_state_dict(trained_state())
    assert (short.attempted, int(short.committed)) == (0, 0)


SELECTED = {
    "adam": lambda p: torch.optim.Adam(p, 1e-2),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 1e-2),
    "sgd": lambda p: torch.optim.SGD(p, 1e-2, momentum=0.9),
    "fused adam": lambda p: torch.optim.Adam(p, 1e-2, fused=True),
}


@pytest.mark.parametrize("is_resumed", [False, True])
@pytest.mark.parametrize("optimizer", sorted(SELECTED))
def test_parts_that_are_frozen_for_a_while_are_guarded_when_they_are_trained_again(
    optimizer: str, is_resumed: bool
) -> None:
    step = made(optimizer=SELECTED[optimizer], schedule=None, steps=2)
    if is_resumed:
        step.load_state_dict(copy.deepcopy(step.state_dict()))
    loss_fn = loss_of(step.model)
    for is_trained in (False, True, False, True):
        step.model.conv.requires_grad_(is_trained)
        before = everything(step._step)
        assert not step(loss_fn, [poisoned()]).committed
        assert_same_bits(before, everything(step._step))
        assert step(loss_fn, [batch(1)]).committed
