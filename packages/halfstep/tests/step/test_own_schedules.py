"""`schedule=` in a custom loop: per optimizer, per step, per epoch or by a metric, and never another rate used
than the one reported."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import nn

import halfstep as hs
from halfstep.errors import CheckpointError, ConfigError
from halfstep.step.schedule import SCHEDULES, PlateauFactor, ScheduleOptions, build_schedule

TORCH = torch.optim.lr_scheduler
X = torch.ones(4, 2)


def sgd(module: nn.Module, lr: float = 1.0, *, fused: bool = True) -> torch.optim.SGD:
    return torch.optim.SGD(module.parameters(), lr, fused=fused)


def made(optimizer: Any, model: nn.Module, schedule: Any, **more: Any) -> hs.Step:
    return hs.Step(model, optimizer, "fp32", schedule=schedule, **more)


def make_one(make_schedule: Any, lr: float = 1.0, *, fused: bool = True) -> tuple[torch.optim.SGD, hs.Step]:
    """Return an optimizer and the step that it makes, with the schedule made for it."""
    model = nn.Linear(2, 2)
    optimizer = sgd(model, lr, fused=fused)
    return optimizer, made(optimizer, model, make_schedule(optimizer))


def stepped(step: hs.Step, times: int = 1) -> list[float]:
    return [step(lambda x: step.model(x).mean(), [X]).lr for _ in range(times)]


def rate(optimizer: torch.optim.Optimizer) -> float:
    return float(optimizer.param_groups[0]["lr"])


def two_optimizers() -> tuple[nn.Sequential, torch.optim.SGD, torch.optim.SGD]:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    return model, sgd(model[0], 1.0), sgd(model[1], 0.5)


# --- per optimizer ---


def test_a_scheduler_drives_the_optimizer_it_was_made_with_and_no_other() -> None:
    model, a, b = two_optimizers()
    step = made([a, b], model, hs.per_step(TORCH.StepLR(a, 1, 0.1)))
    stepped(step, 3)
    assert (rate(a), rate(b)) == pytest.approx((0.01, 0.5))
    b.param_groups[0]["lr"] = 0.25  # it has no schedule, so it is the user's
    stepped(step)
    assert rate(b) == 0.25


def test_a_list_gives_each_optimizer_its_own_schedule_or_none_and_a_function_drives_all() -> None:
    model, a, b = two_optimizers()
    step = made([a, b], model, [lambda k: 1 / (1 + k), hs.per_step(TORCH.ExponentialLR(b, 0.5))])
    assert stepped(step, 3) == pytest.approx([1, 1 / 2, 1 / 3])
    assert rate(b) == pytest.approx(0.5 * 0.25)
    for schedule, rates in (([None, lambda k: 0.1], (1.0, 0.05)), (lambda k: 0.5, (0.5, 0.25))):
        model, a, b = two_optimizers()
        assert stepped(made([a, b], model, schedule)) == [rates[0]], "the first one's rate is reported"
        assert (rate(a), rate(b)) == pytest.approx(rates)


def test_a_scheduler_of_an_optimizer_that_is_not_here_is_refused() -> None:
    model, a, b = two_optimizers()
    foreign = TORCH.StepLR(sgd(nn.Linear(1, 1)), 1)
    with pytest.raises(ConfigError, match="another optimizer"):
        made(a, model, foreign)
    with pytest.raises(ConfigError, match="another optimizer"):
        made([a, b], model, [TORCH.StepLR(b, 1), TORCH.StepLR(a, 1)])
    with pytest.raises(ConfigError, match="1 schedules for 2 optimizers"):
        made([a, b], model, [None])


@pytest.mark.parametrize("given", ["cosine", 0.1, {}, TORCH.StepLR])
def test_what_is_no_schedule_is_refused_with_what_one_is(given: object) -> None:
    with pytest.raises(ConfigError, match="CosineAnnealingLR") as error:
        make_one(lambda _: given)
    assert "hs.per_step" in error.value.fix


# --- per step or per epoch ---


def test_a_function_per_epoch_is_asked_for_epochs() -> None:
    _, step = make_one(lambda _: hs.per_epoch(lambda epoch: 1 / (1 + epoch)))
    rates = []
    for _ in range(3):
        rates += stepped(step, 2)
        step.epoch_ended()
    assert rates == pytest.approx([1, 1, 1 / 2, 1 / 2, 1 / 3, 1 / 3])


def test_a_forgotten_epoch_ended_is_noticed() -> None:
    _, step = make_one(lambda _: hs.per_epoch(lambda epoch: 0.5))
    assert len(list(step.windows([X, X]))) == 2
    with pytest.warns(UserWarning, match="epoch_ended"):
        list(step.windows([X]))


@pytest.mark.parametrize("kind", ["none", "function per step", "ReduceLROnPlateau per validation"])
def test_epoch_ended_and_validated_are_refused_without_a_schedule_that_follows_them(kind: str) -> None:
    _, step = make_one(lambda optimizer: kinds_of_schedules(optimizer)[kind])
    with pytest.raises(ConfigError, match=r"per_epoch"):
        step.epoch_ended()
    if "Plateau" not in kind:
        with pytest.raises(ConfigError, match="ReduceLROnPlateau"):
            step.validated(0.5)


SHORT = {
    "step": lambda o: TORCH.StepLR(o, 1, 0.7),
    "milestones": lambda o: TORCH.MultiStepLR(o, [100, 150, 200], 0.1),
    "exponential": lambda o: TORCH.ExponentialLR(o, 0.95),
    "cosine over epochs": lambda o: TORCH.CosineAnnealingLR(o, 90),
}
LONG = {
    "cosine over steps": lambda o: TORCH.CosineAnnealingLR(o, 10_000),
    "warmup": lambda o: TORCH.LinearLR(o, 1e-3, 1.0, 500),
    "onecycle, which torch steps after batches": lambda o: TORCH.OneCycleLR(o, 1.0, 60, cycle_momentum=False),
    "a function that ends": lambda o: TORCH.LambdaLR(o, ([1.0] * 5).__getitem__),
}


@pytest.mark.parametrize("name", SHORT)
def test_a_scheduler_that_looks_like_one_of_epochs_is_asked_about_unless_it_was_said(name: str) -> None:
    with pytest.warns(UserWarning, match=r"hs.per_epoch\(scheduler\).*hs.per_step"):
        make_one(SHORT[name])
    make_one(lambda optimizer: hs.per_step(SHORT[name](optimizer)))
    make_one(lambda optimizer: hs.per_epoch(SHORT[name](optimizer)))


@pytest.mark.parametrize("name", LONG)
def test_a_scheduler_over_many_steps_is_followed_silently(name: str) -> None:
    stepped(make_one(LONG[name])[1], 3)


def test_a_function_that_gives_rates_instead_of_multiples_is_asked_about() -> None:
    with pytest.warns(UserWarning, match=r"at most 0.0006.*multiple of the optimizer's learning rate, 0.0006"):
        make_one(lambda _: lambda k: 6e-4 * min(1, k / 100), 6e-4)
    make_one(lambda _: lambda k: 6e-4)
    make_one(lambda _: lambda k: min(1, k / 5000), 6e-4)  # a long warmup


# --- by a metric ---

PLATEAUS: dict[str, dict[str, Any]] = {
    "min": {"mode": "min", "patience": 1, "factor": 0.5},
    "max, absolute threshold": {"mode": "max", "patience": 0, "threshold": 0.05, "threshold_mode": "abs"},
    "cooldown": {"patience": 1, "cooldown": 2, "factor": 0.1},
    "min_lr and eps": {"patience": 0, "factor": 0.1, "min_lr": 1e-3, "eps": 1e-2},
}
METRICS = [1.0, 0.9, 0.91, 0.92, 0.93, 0.8, 0.8, 0.8, 0.8, float("nan"), 0.81, 0.79, 0.5, 0.6, 0.7, 0.7, 0.7, 0.7]


@pytest.mark.parametrize("name", PLATEAUS)
@pytest.mark.parametrize("fused", [True, False])
def test_a_plateau_cuts_exactly_when_torchs_does(name: str, fused: bool) -> None:
    _, step = make_one(lambda optimizer: TORCH.ReduceLROnPlateau(optimizer, **PLATEAUS[name]), fused=fused)
    twin = sgd(nn.Linear(1, 1))
    torchs = TORCH.ReduceLROnPlateau(twin, **PLATEAUS[name])
    for metric in METRICS:
        assert stepped(step) == pytest.approx([rate(twin)])
        step.validated(torch.tensor(metric))
        torchs.step(metric)


@pytest.mark.parametrize("fused", [True, False])
def test_the_groups_show_a_new_rate_at_once(fused: bool) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    a, b = sgd(model[0], 1.0, fused=fused), sgd(model[1], 0.5, fused=fused)
    step = made([a, b], model, [hs.per_epoch(TORCH.StepLR(a, 1, 0.5)), TORCH.ReduceLROnPlateau(b, patience=0)])
    stepped(step)
    step.epoch_ended()
    assert (rate(a), rate(b)) == (0.5, 0.5)
    step.validated(1.0)
    step.validated(2.0)
    assert (rate(a), rate(b)) == pytest.approx((0.5, 0.05))
    assert stepped(step) == [0.5]


@pytest.mark.parametrize("paced", [hs.per_step, hs.per_epoch])
def test_a_plateau_follows_neither_steps_nor_epochs(paced: Any) -> None:
    with pytest.raises(ConfigError, match="ReduceLROnPlateau") as error:
        paced(TORCH.ReduceLROnPlateau(sgd(nn.Linear(2, 2))))
    assert "step.validated(metric)" in error.value.fix


def kinds_of_schedules(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {
        "none": None,
        "function per step": lambda k: 1.0,
        "function per epoch": hs.per_epoch(lambda k: 1.0),
        "StepLR per step": hs.per_step(TORCH.StepLR(optimizer, 5)),
        "StepLR per epoch": hs.per_epoch(TORCH.StepLR(optimizer, 5)),
        "CosineAnnealingLR per step": hs.per_step(TORCH.CosineAnnealingLR(optimizer, 5)),
        "ReduceLROnPlateau per validation": TORCH.ReduceLROnPlateau(optimizer),
    }


def test_a_state_of_another_schedule_is_refused_and_changes_nothing() -> None:
    model = nn.Linear(2, 2)
    steps: dict[str, hs.Step] = {}
    for name in kinds_of_schedules(sgd(model)):
        optimizer = sgd(model)
        steps[name] = made(optimizer, model, kinds_of_schedules(optimizer)[name])
    for saved, own in itertools.product(steps, steps):
        state = steps[saved].state_dict()
        if saved == own:
            steps[own].load_state_dict(state)
            continue
        with pytest.raises(CheckpointError, match=f"{saved}; this step has {own}"):
            steps[own].load_state_dict(state)
        steps[own].load_state_dict(state | {"schedules": {}})  # as the fix says


@pytest.mark.parametrize(
    ("schedule", "what", "fix"),
    [
        (hs.per_step(lambda k: float("nan")), "it gives nan", "clamp a formula"),
        (hs.per_epoch(lambda k: float("nan")), "it gives nan", "clamp a formula"),
        (lambda step, total: 1.0, "no learning rate for step 0", "one argument"),
        (lambda step: None, "no learning rate for step 0", "one argument"),
        (lambda k: 1 - k / 2, r"step 3: it gives -0\.5", "max(0, "),
    ],
)
def test_a_schedule_that_gives_no_rate_is_refused_with_the_reason(schedule: Any, what: str, fix: str) -> None:
    with pytest.raises(ConfigError, match=what) as error:
        stepped(make_one(lambda _: schedule)[1], 4)
    assert fix in error.value.fix


def test_epochs_and_plateaus_survive_a_round_trip() -> None:
    model, a, b = two_optimizers()

    def new(a: Any, b: Any) -> hs.Step:
        plateau = TORCH.ReduceLROnPlateau(b, patience=0, factor=0.1)
        return made([a, b], model, [hs.per_epoch(TORCH.StepLR(a, 1, 0.5)), plateau])

    step = new(a, b)
    for metric in (1.0, 2.0):
        stepped(step)
        step.epoch_ended()
        step.validated(metric)
    c, d = sgd(model[0], 1.0), sgd(model[1], 0.5)
    resumed = new(c, d)
    resumed.load_state_dict(step.state_dict())
    assert stepped(resumed) == stepped(step) == [0.25]
    assert rate(d) == rate(b) == pytest.approx(0.05)
    with pytest.raises(CheckpointError, match="ReduceLROnPlateau"):
        made([sgd(model[0]), sgd(model[1])], model, None).load_state_dict(step.state_dict())


# --- the schedule alone sets the rate ---


@pytest.mark.parametrize("fused", [True, False])
def test_a_rate_written_by_hand_while_a_schedule_drives_it_is_refused(fused: bool) -> None:
    optimizer, step = make_one(lambda _: lambda k: 0.5, fused=fused)
    optimizer.param_groups[0]["lr"] = 0.0
    with pytest.raises(ConfigError, match="written by hand"):
        stepped(step)
    optimizer.param_groups[0]["lr"] = 1.0 if not fused else step._step.rates.views[0]
    assert stepped(step) == [0.5]
    optimizer.param_groups[0]["lr"] *= 0.1  # in place, where it is a tensor
    with pytest.raises(ConfigError, match="written by hand"):
        stepped(step)


@pytest.mark.parametrize(
    ("wrap", "instead"), [(hs.per_step, "the step advances it"), (hs.per_epoch, r"step.epoch_ended\(\) instead")]
)
@pytest.mark.parametrize("is_chained", [False, True])
@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*")
def test_a_scheduler_that_is_also_stepped_by_hand_is_refused(wrap: Any, instead: str, is_chained: bool) -> None:
    model = nn.Linear(2, 2)
    optimizer = sgd(model)
    scheduler: Any = TORCH.StepLR(optimizer, 1, 0.7)
    scheduler = TORCH.ChainedScheduler([scheduler]) if is_chained else scheduler
    step = made(optimizer, model, wrap(scheduler))
    stepped(step)
    scheduler.step()
    with pytest.raises(ConfigError, match=instead):
        stepped(step)


def test_without_a_schedule_the_users_own_scheduler_and_hand_set_rates_hold() -> None:
    optimizer, step = make_one(lambda _: None)
    scheduler = TORCH.StepLR(optimizer, 1, 0.1)
    assert stepped(step) == [1.0]
    scheduler.step()
    assert stepped(step) == pytest.approx([0.1])
    optimizer.param_groups[0]["lr"] = 0.5
    assert stepped(step) == [0.5]


# --- no further ahead than needed ---

TABLE = dict.fromkeys(range(20), 1.0)


def asserting(k: int) -> float:
    assert k < 20
    return 1.0


ENDING = {
    "polynomial, complex after its end": lambda k: (1 - k / 19) ** 0.9,
    "a table": lambda k: TABLE[k],
    "an assertion": asserting,
    "a division by zero": lambda k: 1 / (20 - k),
    "infinite": lambda k: 1.0 if k < 20 else float("inf"),
}


@pytest.mark.parametrize("name", ENDING)
@pytest.mark.parametrize("as_scheduler", [True, False])
def test_a_schedule_may_end_with_the_training(name: str, as_scheduler: bool) -> None:
    schedule = ENDING[name]
    _, step = make_one(lambda o: hs.per_step(TORCH.LambdaLR(o, schedule)) if as_scheduler else schedule)
    expected = [float(schedule(k)) for k in range(20)]
    assert stepped(step, 20) == pytest.approx(expected)
    with pytest.raises(ConfigError, match="no learning rate for step 20"):
        stepped(step)


def test_skipped_steps_do_not_count_towards_the_end_of_a_schedule() -> None:
    _, step = make_one(lambda _: [1.0, 0.5].__getitem__)
    bad = X * float("nan")
    rates = [step(lambda x: step.model(x).mean(), [x]).lr for x in (bad, X, bad, X)]
    assert rates == [1.0, 1.0, 0.5, 0.5]
    with pytest.raises(ConfigError, match="step 2"):
        stepped(step)


def test_a_group_whose_rate_is_zero_follows_its_scheduler() -> None:
    _, step = make_one(lambda optimizer: TORCH.LambdaLR(optimizer, lambda k: 1.0), 0.0)
    assert stepped(step, 2) == [0.0, 0.0]


def test_a_schedule_is_asked_for_few_steps_ahead() -> None:
    asked: list[int] = []

    def schedule(k: int) -> float:
        asked.append(k)
        return 1.0

    stepped(make_one(lambda _: schedule)[1], 2)
    assert max(asked) < 300


def test_a_run_longer_than_the_table_follows_its_schedule_on() -> None:
    _, step = make_one(lambda _: lambda k: 1 / (1 + k))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert stepped(step, 260)[-1] == pytest.approx(1 / 260)


def test_an_optimizer_that_finds_its_own_rate_is_stored_without_one() -> None:
    """As transformers' Adafactor does: its groups hold lr=None."""
    model = nn.Linear(2, 1)
    optimizer = sgd(model, fused=False)
    optimizer.step = lambda closure=None: None  # type: ignore[method-assign]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        step = hs.Step(model, optimizer, "fp32")
    optimizer.param_groups[0]["lr"] = None
    state = step.state_dict()
    assert state["optimizers"][0]["param_groups"][0]["lr"] is None
    step.load_state_dict(state)


# --- schedules of the config, compared with torch's ---


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


def test_plateau_state_survives_a_round_trip() -> None:
    first = PlateauFactor(patience=1)
    for metric in (0.5, 0.4):
        first.observe(metric)
    second = PlateauFactor(patience=1)
    second.load_state_dict(first.state_dict())
    assert factors_after(first, [0.4, 0.4]) == factors_after(second, [0.4, 0.4]) == pytest.approx([0.1, 0.1])
