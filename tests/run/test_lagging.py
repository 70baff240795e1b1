"""Who the others wait for."""

from __future__ import annotations

import pytest

from halfstep.run.pace import Lagging


@pytest.mark.parametrize(("waits_s", "said"), [((9.0, 0.0, 8.0), "rank 1, others wait"), ((0.0, 0.0), ""), ((), "")])
def test_the_slowest_waits_least(waits_s: tuple[float, ...], said: str) -> None:
    lagging = Lagging()
    lagging.add(waits_s)
    assert lagging.said().startswith(said) if said else not lagging.said()


def test_readings_of_a_run_that_had_other_processes_are_left_out() -> None:
    lagging = Lagging()
    for waits_s in ((9.0, 0.0, 9.0), (0.0, 9.0)):
        lagging.add(waits_s)
    assert lagging.said().startswith("rank 0, ")
