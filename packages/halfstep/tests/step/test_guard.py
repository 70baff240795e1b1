"""The guard: what is routine, what is a fault, when it stops or goes back, and that it looks exactly two steps back."""

from __future__ import annotations

import pytest

from halfstep.errors import ConfigError, TrainingStopped
from halfstep.step.facts import Reading
from halfstep.step.guard import ADVICE_FOR_LOOPS, ADVICE_FOR_RUNS, LAG, Action, Advice, Guard, GuardOptions, Verdict
from halfstep.step.snapshots import Snapshots
from halfstep.step.verdicts import VerdictHandler
from tiny_training import make_step


def reading(step: int, **fields) -> Reading:
    values = {
        "attempted": step, "loss": 1.0, "grad_norm": 1.0, "is_bad": False, "is_spike": False, "is_empty": False,
        "is_ruined": False,
        "scale": 1.0, "committed": step, "lr": 0.1, "sample_ids": (7, 8),
    }  # fmt: skip
    return Reading(**{**values, **fields})


def fault(step: int, **fields) -> Reading:
    return reading(step, loss=float("nan"), is_bad=True, **fields)


def feed(guard: Guard, readings: list[Reading]) -> list[Action]:
    return [guard.watch(one).action for one in readings]


def test_the_guard_looks_exactly_two_steps_back() -> None:
    seen: list[int] = []
    guard = Guard(scaling=False)
    guard.observers.append(lambda facts, reading: seen.append(reading.attempted))
    for k in range(5):
        guard.watch(reading(k))
        assert seen == list(range(k - LAG + 1))
    guard.drain()
    assert seen == [0, 1, 2, 3, 4]


def test_single_faults_are_skipped_and_counted() -> None:
    guard = Guard(GuardOptions(max_consecutive=2), scaling=False)
    assert set(feed(guard, [reading(0), fault(1), reading(2), fault(3), reading(4), reading(5)])) == {Action.CONTINUE}
    assert guard.num_skipped == 2


def test_too_many_faults_in_a_row_stop_with_reason_samples_and_fix() -> None:
    guard = Guard(GuardOptions(max_consecutive=3), scaling=False)
    feed(guard, [fault(k) for k in range(4)])
    verdict = guard.watch(fault(4))
    assert verdict.action is Action.STOP
    assert "3 bad steps in a row" in verdict.reason
    assert "loss is nan" in verdict.reason
    assert "7, 8" in verdict.fix


def test_rollbacks_are_limited_and_name_the_first_fault() -> None:
    guard = Guard(GuardOptions(on_fault="rollback", max_consecutive=2, max_rollbacks=1, lr_cut=0.5), scaling=False)
    feed(guard, [reading(10), fault(11, committed=10), fault(12, committed=10), reading(13)])
    verdict = guard.watch(reading(14))
    assert verdict.action is Action.ROLLBACK
    assert verdict.first_fault_committed == 10
    guard.note_rollback()
    assert guard.rate_factor == 0.5
    assert feed(guard, [fault(k) for k in range(4)])[-1] is Action.STOP


def test_fp16_overflow_is_routine_until_the_scale_lies_on_its_floor() -> None:
    guard = Guard(GuardOptions(max_consecutive=2, floor_patience=3), scaling=True, min_scale=1.0)
    falling = [fault(k, scale=2.0 ** (10 - k)) for k in range(10)]
    assert set(feed(guard, falling)) == {Action.CONTINUE}
    actions = feed(guard, [fault(10 + k, scale=1.0) for k in range(5)])
    assert actions[-1] is Action.STOP


@pytest.mark.parametrize(("loss", "advice"), [(6e4, "scaler.min_scale"), (float("inf"), "the model itself")])
def test_at_the_floor_a_finite_loss_is_distinguished_from_a_model_that_overflows(loss: float, advice: str) -> None:
    guard = Guard(GuardOptions(floor_patience=1), scaling=True, min_scale=1.0)
    verdict = guard.judge(reading(0, loss=loss, grad_norm=float("inf"), is_bad=True))
    assert verdict.action is Action.STOP
    assert advice in verdict.fix


def test_empty_windows_are_no_fault() -> None:
    guard = Guard(GuardOptions(max_consecutive=1), scaling=False)
    assert set(feed(guard, [reading(k, is_bad=True, is_empty=True) for k in range(6)])) == {Action.CONTINUE}


def test_a_resumed_guard_judges_the_pending_steps_at_the_same_moment() -> None:
    options = GuardOptions(max_consecutive=3)
    whole, first, second = (Guard(options, scaling=False) for _ in range(3))
    steps = [reading(0), fault(1), fault(2), fault(3), reading(4), reading(5)]
    expected = feed(whole, steps)
    begun = feed(first, steps[:3])
    second.load_state_dict(first.state_dict())
    assert begun + feed(second, steps[3:]) == expected
    assert Action.STOP in expected


@pytest.mark.parametrize("wrong", [{"on_fault": "ignore"}, {"max_consecutive": 0}, {"lr_cut": 0.0}])
def test_options_that_cannot_guard_are_refused(wrong: dict) -> None:
    with pytest.raises(ConfigError):
        GuardOptions(**wrong)


# --- what is done about a verdict ---


@pytest.mark.parametrize(
    ("advice", "setting"), [(ADVICE_FOR_RUNS, "guard.margin"), (ADVICE_FOR_LOOPS, '"margin" in guard={...}')]
)
def test_a_rollback_without_an_old_snapshot_stops_with_what_was_saved_and_what_helps(
    advice: Advice, setting: str
) -> None:
    step, guard = make_step(), Guard(scaling=False, advice=advice)
    guard.num_faults = 5
    handler = VerdictHandler(
        guard=guard, model=step.model, step=step, snapshots=Snapshots(every=1, margin=0),
        save=lambda: f", saved after {guard.num_faults} faults", suggest=lambda: ["or this"],
    )  # fmt: skip
    with pytest.raises(TrainingStopped) as stopped:
        handler.act_on(Verdict(action=Action.ROLLBACK, reason="R"))
    assert stopped.value.what.startswith("training stopped: R")
    assert stopped.value.why.endswith("the weights are those of the last good step, saved after 0 faults")
    assert f"a smaller {setting}, or a lower learning rate" in stopped.value.fix
    assert stopped.value.fix.endswith("; or this")
