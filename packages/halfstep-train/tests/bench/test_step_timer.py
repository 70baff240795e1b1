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


def test_a_slow_window_shows_in_the_spread() -> None:
    schedule = Schedule(warm_up=1, ramp=0, window=1)
    timer = StepTimer(schedule, CPU)
    for step in range(schedule.steps):
        time.sleep(0.03 if step == 3 else 0.001)
        timer()
    windows = timer.get_finished().window_s
    assert max(windows) == windows[2] > 2 * min(windows)


def test_a_cpu_has_neither_memory_of_a_rows_own_nor_an_energy_counter() -> None:
    schedule = Schedule(warm_up=1, ramp=0, window=1)
    timer = StepTimer(schedule, CPU)
    for _ in range(schedule.steps):
        timer()
    found = timer.get_finished()
    assert (found.peak_bytes, found.start_peak_bytes) == (None, None)
    assert (found.reserved_bytes, found.joules_per_step, found.clock_limits) == (None, None, ())


def test_steps_are_spread_over_equal_windows() -> None:
    assert make_schedule(23, CPU).window == 4
    assert make_schedule(100, torch.device("cuda")).window == 20
