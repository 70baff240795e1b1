"""The clock: what counts is the windows after the warm-up."""

from __future__ import annotations

import time

import torch

from halfstep_train.bench.measure_row import NUM_WINDOWS, Schedule, StepTimer, make_schedule

CPU = torch.device("cpu")


def test_the_windows_see_the_timed_steps_and_not_the_warm_up() -> None:
    schedule = Schedule(warm_up=2, ramp=1, window=2)
    timer = StepTimer(schedule, CPU)
    for step in range(schedule.steps):
        time.sleep(0.05 if step < 3 else 0.002)
        timer()
    found = timer.get_finished()
    assert len(found.window_s) == NUM_WINDOWS
    assert all(0.002 <= seconds < 0.03 for seconds in found.window_s)
    assert 0.05 <= found.start_s < 0.1


def test_steps_are_spread_over_equal_windows() -> None:
    assert make_schedule(23, CPU).window == 4
    assert make_schedule(100, torch.device("cuda")).window == 20
