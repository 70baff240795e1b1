"""Schedules are pure functions of the committed step, pinned to torch's where torch has them."""

from __future__ import annotations

import math
from collections.abc import Iterable

import pytest
import torch

from halfstep.errors import ConfigError
from halfstep.step.schedule import SCHEDULES, PlateauFactor, ScheduleOptions, build_schedule
from tiny_training import batch, loss_of, make_step, poisoned


def torch_curve(make, steps: int) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    scheduler = make(optimizer)
    seen = []
    for _ in range(steps):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return seen


def our_curve(steps: int, **options) -> list[float]:
    schedule = build_schedule(ScheduleOptions(total_steps=steps, **options))
    return [schedule(step) for step in range(steps)]


TORCH = torch.optim.lr_scheduler
CASES = {
    "cosine": ({"name": "cosine"}, lambda o: TORCH.CosineAnnealingLR(o, 50)),
    "linear": ({"name": "linear"}, lambda o: TORCH.LinearLR(o, 1.0, 0.0, 50)),
    "polynomial": ({"name": "polynomial", "power": 0.96}, lambda o: TORCH.PolynomialLR(o, 50, 0.96)),
    "exponential": ({"name": "exponential", "half_life_steps": 10}, lambda o: TORCH.ExponentialLR(o, 0.5**0.1)),
    "step": ({"name": "step", "step_size": 7}, lambda o: TORCH.StepLR(o, 7)),
    "milestones": ({"name": "step", "milestones": (5, 20)}, lambda o: TORCH.MultiStepLR(o, [5, 20])),
    "onecycle": ({"name": "onecycle"}, lambda o: TORCH.OneCycleLR(o, 1.0, total_steps=50, cycle_momentum=False)),
}


@pytest.mark.parametrize("case", sorted(CASES))
def test_curves_equal_torchs(case: str) -> None:
    options, make = CASES[case]
    assert our_curve(50, **options) == pytest.approx(torch_curve(make, 50), abs=1e-12)


@pytest.mark.parametrize("steps", [1, 2, 3])
@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_a_run_of_a_few_steps_has_the_full_rate_in_the_first(name: str, steps: int) -> None:
    assert our_curve(steps, name=name, warmup_steps=1, step_size=100)[0] == 1.0


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_warmup_rises_linearly_and_its_first_step_already_moves(name: str) -> None:
    curve = our_curve(50, name=name, warmup_steps=5, step_size=100)
    top = curve[5] if name != "onecycle" else build_schedule(ScheduleOptions(name=name, total_steps=45))(0)
    assert curve[:5] == pytest.approx([top * share for share in (0.2, 0.4, 0.6, 0.8, 1.0)])


def test_a_decay_may_begin_below_the_warmup() -> None:
    curve = our_curve(50, name="exponential", half_life_steps=10, warmup_steps=5, decay_from_start=True)
    assert curve == pytest.approx([min((step + 1) / 5, 1) * 0.5 ** (step / 10) for step in range(50)])


@pytest.mark.parametrize("name", ["cosine", "linear", "polynomial"])
def test_after_the_last_step_the_rate_stays_at_its_floor(name: str) -> None:
    schedule = build_schedule(ScheduleOptions(name=name, total_steps=10, min_factor=0.1))
    assert schedule(10) == pytest.approx(0.1)
    assert schedule(10_000) == pytest.approx(0.1)


def test_an_unknown_schedule_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="cosine"):
        build_schedule(ScheduleOptions(name="cosin"))


def test_a_skipped_step_does_not_move_the_schedule() -> None:
    step = make_step()
    loss_fn = loss_of(step.model)
    rates = [step(loss_fn, [one]).read().lr for one in (batch(0), poisoned(), poisoned(), batch(1))]
    # Warmup over three steps: the skipped ones see the second rate again and again.
    assert rates == pytest.approx([1e-2 / 3, 2e-2 / 3, 2e-2 / 3, 2e-2 / 3])


def test_a_run_may_outlive_the_table() -> None:
    step = make_step()
    step.rates.cover(10_000, step.committed)
    assert step.rates.table.shape[1] > 10_000
    step.committed.fill_(9_999)
    step.rates.refresh(step.committed)
    assert step.rates.now[0].item() == pytest.approx(0.0, abs=1e-9)


def test_plateau_cuts_after_patience_and_ignores_nan() -> None:
    plateau = PlateauFactor(mode="max", cut=0.1, patience=2)
    factors = factors_after(plateau, (0.5, 0.6, 0.6, math.nan, 0.6, 0.6, 0.7, 0.6))
    assert factors == pytest.approx([1, 1, 1, 1, 1, 0.1, 0.1, 0.1])


def test_plateau_of_a_negative_metric_cuts_when_it_gets_worse() -> None:
    """torch's relative threshold takes -1.00005 for better than -1."""
    plateau = PlateauFactor(mode="max", cut=0.5, patience=0)
    assert factors_after(plateau, (-1.0, -1.00005, -1.0, -0.5)) == [1.0, 0.5, 0.25, 0.25]


def factors_after(plateau: PlateauFactor, metrics: Iterable[float]) -> list[float]:
    factors = []
    for metric in metrics:
        plateau.observe(metric)
        factors.append(plateau.factor)
    return factors


def test_plateau_follows_torchs_reduce_on_plateau() -> None:
    metrics = [0.3, 0.4, 0.39, 0.4, 0.4, 0.41, 0.2, 0.2, 0.2, 0.2, 0.2, 0.9, 0.1, 0.1, 0.1, 0.1]
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    torchs = TORCH.ReduceLROnPlateau(optimizer, mode="max", patience=2, factor=0.5)
    ours = PlateauFactor(mode="max", cut=0.5, patience=2)
    for metric in metrics:
        torchs.step(metric)
        ours.observe(metric)
        assert ours.factor == pytest.approx(optimizer.param_groups[0]["lr"])


def test_plateau_state_survives_a_round_trip() -> None:
    first = PlateauFactor(patience=1)
    for metric in (0.5, 0.4):
        first.observe(metric)
    second = PlateauFactor(patience=1)
    second.load_state_dict(first.state_dict())
    assert factors_after(first, [0.4, 0.4]) == factors_after(second, [0.4, 0.4]) == pytest.approx([0.1, 0.1])
