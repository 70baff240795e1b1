from __future__ import annotations

import pytest

from halfstep.hardware.clock import Stopwatch, Throughput


class HandClock:
    """A clock that moves when told."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_a_stopwatch_gives_laps() -> None:
    clock = HandClock()
    watch = Stopwatch(clock=clock)
    clock.now_s += 2.0
    assert watch.elapsed_s == 2.0
    assert watch.restart() == 2.0
    clock.now_s += 0.5
    assert watch.elapsed_s == 0.5


@pytest.mark.parametrize(
    ("steps", "rate"),
    [
        ([], 0.0),
        ([0.5] * 3, 16.0),
        ([60.0] + [0.5] * 30, 16.0),  # a slow start leaves the window
        ([20.0] * 4, 0.4),  # steps longer than the window still have a rate
        ([0.5] * 3 + ["validation"] + [0.25] * 2, 32.0),
    ],
)
def test_throughput_counts_the_samples_of_the_last_seconds(steps: list[float | str], rate: float) -> None:
    clock = HandClock()
    meter = Throughput(window_s=10.0, clock=clock)
    for step_s in steps:
        clock.now_s += 30.0 if isinstance(step_s, str) else step_s
        if isinstance(step_s, str):
            meter.restart()
        else:
            meter.add(8)
    assert meter.compute_rate() == pytest.approx(rate)
