"""The clock of trials: what it bounds, what it leaves to the rule, and a trial that is timed against it."""

from __future__ import annotations

import pytest

from halfstep_train.tune.trials import CANDIDATES, LASTING_S, MOST_S, ROUNDS, TIMED_STEPS, TrialTime, time_lasting_step


class Hands:
    """A clock that goes on when it is told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_the_limit_is_a_minute_until_the_run_is_known_to_be_short() -> None:
    time = TrialTime(1000, most_s=MOST_S)
    assert time.limit_s == 60
    time.expect(0.1)
    assert time.limit_s == pytest.approx(5)
    time.expect(10)
    assert time.limit_s == 60


def test_time_is_over_when_steps_took_it_and_starts_are_counted_apart() -> None:
    hands = Hands()
    time = TrialTime(1000, most_s=MOST_S, clock=hands)
    time.expect(1.0)
    with time.count_start():
        hands.now += 40
    assert (time.starts_s, time.spent_s, time.is_over) == (40, 0, False)
    hands.now += 49.9
    assert not time.is_over
    hands.now += 0.1
    assert time.is_over
    assert time.for_one_s == 0


def test_all_starts_together_fit_into_a_twentieth_of_the_run() -> None:
    hands = Hands()
    time = TrialTime(1000, most_s=MOST_S, clock=hands)
    assert time.has_room_for(1e6)  # nothing is known yet
    time.expect(1.0)
    assert time.has_room_for(50)
    assert not time.has_room_for(51)
    with time.count_start():
        hands.now += 30
    assert time.has_room_for(20)
    assert not time.has_room_for(21)


def test_one_candidate_does_not_use_up_what_the_others_need() -> None:
    hands = Hands()
    time = TrialTime(1000, most_s=MOST_S, clock=hands)
    assert time.for_one_s == MOST_S / CANDIDATES
    hands.now += 50
    assert time.for_one_s == 10


def test_without_a_limit_nothing_is_ever_over() -> None:
    time = TrialTime()
    time.expect(1e9)
    assert not time.is_over
    assert time.has_room_for(1e9)


class HotDevice:
    """Steps of 20 ms that take 22 once it has worked for half a second."""

    def __init__(self, hands: Hands) -> None:
        self.hands, self.began, self.steps = hands, hands.now, 0

    def round(self, num_steps: int) -> float:
        began = self.hands.now
        for _ in range(num_steps):
            self.hands.now += 0.020 if self.hands.now - self.began < 0.5 else 0.022
        self.steps += num_steps
        return (self.hands.now - began) / num_steps


def test_a_step_is_timed_until_its_device_is_hot() -> None:
    hands = Hands()
    device = HotDevice(hands)
    assert time_lasting_step(device.round, TrialTime(clock=hands), LASTING_S) == pytest.approx(0.022)
    assert device.steps * 0.020 < 2 * LASTING_S


def test_a_device_that_does_not_get_hot_is_timed_for_a_few_rounds() -> None:
    hands = Hands()
    device = HotDevice(hands)
    assert time_lasting_step(device.round, TrialTime(clock=hands), 0.0) == pytest.approx(0.020)
    assert device.steps == 1 + ROUNDS * TIMED_STEPS


def test_a_short_run_has_no_time_for_a_hot_device() -> None:
    hands = Hands()
    device, time = HotDevice(hands), TrialTime(200, most_s=MOST_S, clock=hands)  # 4 s, so 0.2 for trials
    assert time_lasting_step(device.round, time, LASTING_S) == pytest.approx(0.020)
    assert time.spent_s <= 0.020 + 0.2 / CANDIDATES + 0.020  # one to begin with, and one begun in time


def test_a_device_that_rests_between_rounds_rests_seldom() -> None:
    hands = Hands()
    began = hands.now

    def a_round(num_steps: int) -> float:
        """Steps of 22 ms, and two of 20 after a rest."""
        took = sum(0.020 if step < 2 else 0.022 for step in range(num_steps))
        hands.now += took
        return took / num_steps

    assert 0.0216 < time_lasting_step(a_round, TrialTime(clock=hands), LASTING_S) < 0.022
    assert hands.now - began < 2 * LASTING_S
