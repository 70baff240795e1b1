"""Random training programs end bit-equal with fast="off" and captured: tests/support/fuzzed_loops.py draws them.

A failure prints the smallest program that shows it; `fuzzed_loops.compare(Program(...))` runs it by hand."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from fuzzed_loops import MODES, Program, assert_same, programs


def compare_many(mode: str, num_examples: int, **choices: Any) -> list[bool]:
    """Compare random programs. Return which of them were captured."""
    were_captured: list[bool] = []

    @settings(
        max_examples=num_examples, deadline=None, database=None, suppress_health_check=list(HealthCheck), **choices
    )
    @given(programs(mode))
    def check(program: Program) -> None:
        were_captured.append(assert_same(program).was_captured)

    check()
    return were_captured


@pytest.mark.parametrize("mode", MODES)
def test_random_programs_train_captured_as_they_do_eagerly(mode: str) -> None:
    were_captured = compare_many(mode, 10 if mode == "graph" else 6, derandomize=True)
    assert sum(were_captured) >= 3, "too few programs are captured to show anything"


@pytest.mark.soak
@pytest.mark.parametrize("number", range(20))
def test_two_thousand_random_programs(number: int) -> None:
    for mode in MODES:
        compare_many(mode, {"graph": 50, "checked": 15, "compiled": 35}[mode])
