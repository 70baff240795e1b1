"""BatchNorm's running statistics: averaged faster in the first steps, torch's own moves afterwards."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from halfstep.step.norm_averages import NormAverages
from halfstep.step.step import GuardedStep
from tiny_training import assert_same_bits, batch, everything, loss_of, make_step, poisoned


def make_averaging_step(**more: object) -> GuardedStep:
    step = make_step(**more)  # type: ignore[arg-type]
    step.norms = NormAverages(step.model)
    return step


def statistics(model: nn.Module) -> tuple[Tensor, Tensor]:
    norm: nn.BatchNorm2d = model.norm  # type: ignore[assignment]
    assert norm.running_mean is not None
    assert norm.running_var is not None
    return norm.running_mean.clone(), norm.running_var.clone()


def test_the_first_steps_give_what_a_falling_momentum_gives() -> None:
    step, plain = make_averaging_step(), make_step()
    for number in range(1, 15):
        plain.model.norm.momentum = max(0.1, 8 / (number + 7))  # type: ignore[assignment]
        for own in (step, plain):
            assert not own(loss_of(own.model), [batch(number)]).read().is_bad
        for found, wanted in zip(statistics(step.model), statistics(plain.model), strict=True):
            # The first step subtracts numbers up to 1: ten times fp32's rounding of them.
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=2e-6)


def test_from_step_73_on_no_bit_differs_from_torchs() -> None:
    step = make_averaging_step()
    for number in range(73):
        step(loss_of(step.model), [batch(number)])
    plain = make_step()
    plain.model.load_state_dict(step.model.state_dict())
    loaded = copy.deepcopy(step.state_dict())
    plain.load_state_dict(loaded)
    for number in range(73, 77):
        for own in (step, plain):
            own(loss_of(own.model), [batch(number)])
    assert_same_bits(everything(step), everything(plain))


@pytest.mark.parametrize("good_before", [0, 3])
def test_a_bad_step_leaves_the_statistics_alone(good_before: int) -> None:
    step = make_averaging_step()
    for number in range(good_before):
        step(loss_of(step.model), [batch(number)])
    before = everything(step)
    assert step(loss_of(step.model), [poisoned()]).read().is_bad
    assert_same_bits(before, everything(step))


def test_several_micro_batches_and_shared_layers_never_overshoot() -> None:
    step = make_averaging_step(accumulate=4)
    images = [batch(number) for number in range(4)]
    with torch.no_grad():
        seen = torch.cat([step.model.conv(one["image"]) for one in images])  # type: ignore[operator]
    step(loss_of(step.model), images)
    mean, variance = statistics(step.model)
    # All four moved them, 1 - (1 - 8/11)^4 = 0.994 of the way from 0, and weigh 24 to 28 % each.
    torch.testing.assert_close(mean, 0.994 * seen.mean((0, 2, 3)), rtol=0.1, atol=0)
    assert torch.all(variance < 1)
    assert torch.all(variance > 0)


def test_layers_that_run_elsewhere_or_count_for_themselves_are_left_alone() -> None:
    model = nn.Sequential(
        nn.BatchNorm1d(2, momentum=None), nn.BatchNorm1d(2, momentum=0.0), nn.BatchNorm1d(2, track_running_stats=False)
    )
    assert not NormAverages(model).norms
    frozen = nn.BatchNorm1d(2).eval()
    averages = NormAverages(frozen)
    averages.save()
    frozen(torch.randn(4, 2))
    averages.settle()
    assert torch.equal(frozen.running_var, torch.ones(2))  # type: ignore[arg-type]
