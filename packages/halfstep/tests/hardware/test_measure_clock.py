from __future__ import annotations

import pytest

from halfstep.hardware.clock import Stopwatch, Throughput


class HandClock:
    """A clock that moves when told."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def run_steps(meter: Throughput, clock: HandClock, *, count: int, step_s: float, batch: int) -> None:
    for _ in range(count):
        clock.now_s += step_s
        meter.add(batch)


def test_a_stopwatch_gives_laps() -> None:
    clock = HandClock()
    watch = Stopwatch(clock=clock)
    clock.now_s += 2.0
    assert watch.elapsed_s == 2.0
    assert watch.restart() == 2.0
    clock.now_s += 0.5
    assert watch.elapsed_s == 0.5


def test_throughput_is_zero_before_the_first_step() -> None:
    assert Throughput(clock=HandClock()).compute_rate() == 0.0


def test_throughput_counts_samples_per_second() -> None:
    clock = HandClock()
    meter = Throughput(clock=clock)
    run_steps(meter, clock, count=3, step_s=0.5, batch=8)
    assert meter.compute_rate() == pytest.approx(16.0)


def test_throughput_forgets_a_slow_start_once_it_left_the_window() -> None:
    clock = HandClock()
    meter = Throughput(window_s=10.0, clock=clock)
    run_steps(meter, clock, count=1, step_s=60.0, batch=8)
    run_steps(meter, clock, count=30, step_s=0.5, batch=8)
    assert meter.compute_rate() == pytest.approx(16.0)


def test_a_step_longer_than_the_window_still_has_a_rate() -> None:
    clock = HandClock()
    meter = Throughput(window_s=10.0, clock=clock)
    run_steps(meter, clock, count=4, step_s=20.0, batch=8)
    assert meter.compute_rate() == pytest.approx(0.4)


def test_a_restart_keeps_a_validation_out_of_the_rate() -> None:
    clock = HandClock()
    meter = Throughput(clock=clock)
    run_steps(meter, clock, count=3, step_s=0.5, batch=8)
    clock.now_s += 30.0
    meter.restart()
    run_steps(meter, clock, count=2, step_s=0.25, batch=8)
    assert meter.compute_rate() == pytest.approx(32.0)
