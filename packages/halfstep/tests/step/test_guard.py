"""The guard: what is routine, what is a fault, when it stops or goes back, and that it looks exactly two steps back."""

from __future__ import annotations

import pytest
import torch

from halfstep.errors import TrainingStopped
from halfstep.step.facts import Reading
from halfstep.step.guard import ADVICE_FOR_LOOPS, ADVICE_FOR_RUNS, LAG, Action, Advice, Guard, GuardOptions, Verdict
from halfstep.step.scaler import Scaler, ScalerOptions
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


# --- our scaler against torch's GradScaler: same scales, same growth, same state ---

CPU = torch.device("cpu")
PATTERN = [0, 0, 1, 0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]


def torch_scales(pattern: list[int]) -> list[tuple[float, int]]:
    """The same overflows fed through a real GradScaler and a real optimizer."""
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    seen = []
    for overflow in pattern:
        scaler.scale(weight.sum()).backward()
        if overflow:
            weight.grad.fill_(float("inf"))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        seen.append((scaler.get_scale(), scaler._growth_tracker.item()))
    return seen


def test_scale_and_growth_tracker_follow_torchs_gradscaler_step_by_step() -> None:
    scaler = Scaler(CPU, enabled=True, options=ScalerOptions(init_scale=1024.0, growth_interval=3))
    ours = []
    for overflow in PATTERN:
        scaler.update(torch.tensor(bool(overflow)))
        ours.append((scaler.value.item(), scaler.growth_tracker.item()))
    assert ours == torch_scales(PATTERN)


def test_the_scale_never_falls_below_its_floor() -> None:
    scaler = Scaler(CPU, enabled=True, options=ScalerOptions(init_scale=8.0, min_scale=2.0))
    for _ in range(5):
        scaler.update(torch.tensor(True))
    assert scaler.value.item() == 2.0


def test_a_torch_gradscaler_state_can_be_continued() -> None:
    torchs = torch.amp.GradScaler("cpu", init_scale=4096.0)
    torchs.scale(torch.ones(()))  # torch builds its tensors on first use
    scaler = Scaler(CPU, enabled=True)
    scaler.load_state_dict(torchs.state_dict())
    assert scaler.value.item() == 4096.0
    assert scaler.state_dict().keys() == torchs.state_dict().keys()


def test_a_half_precision_loss_is_scaled_in_fp32() -> None:
    loss = torch.tensor(8517.0, dtype=torch.float16)
    assert torch.isfinite(Scaler(CPU, enabled=True).scale(loss))


def test_a_disabled_scaler_is_the_identity_and_has_no_state() -> None:
    scaler = Scaler(CPU, enabled=False)
    loss = torch.tensor(2.0)
    scaler.update(torch.tensor(True))
    assert scaler.scale(loss) is loss
    assert scaler.state_dict() == {}
    scaler.load_state_dict({})


@pytest.mark.parametrize(("accumulate", "start"), [(1, 65536), (2, 32768), (3, 16384), (4, 16384), (1 << 20, 1)])
def test_a_window_starts_with_the_scale_that_a_divided_loss_would_have(accumulate: int, start: float) -> None:
    assert Scaler(CPU, enabled=True, accumulate=accumulate).value.item() == start
    assert Scaler(CPU, enabled=False, accumulate=accumulate).value.item() == 1


@pytest.mark.parametrize(
    ("first", "accumulate", "low"), [(65536.0, 1, 64.0), (65536.0, 4, 16.0), (16.0, 1, 1.0), (2.0**32, 1, 64.0)]
)
def test_a_low_scale_is_far_below_the_first_one_or_the_usual_one(first: float, accumulate: int, low: float) -> None:
    options = ScalerOptions(init_scale=first)
    assert Scaler(torch.device("cpu"), enabled=True, options=options, accumulate=accumulate).low == low
