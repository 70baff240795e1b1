"""A bad step changes nothing: every optimizer, every precision, the first step, a middle one, two in a row."""

from __future__ import annotations

import copy

import pytest
import torch

from halfstep.step.optim.by_name import OPTIMIZERS
from tiny_training import assert_same_bits, batch, everything, loss_of, make_step, poisoned

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
