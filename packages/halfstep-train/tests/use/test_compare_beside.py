"""Parallel runs end with their comparison. Each process imports torch, which takes seconds."""

from __future__ import annotations

import multiprocessing
import time
from pathlib import Path

import pytest

from halfstep_train.use.compare_run import ComparedRow, RunOutcome, run_in_parallel


def at_once_or_in_minutes(row: ComparedRow, seed: int, place: Path) -> RunOutcome:
    time.sleep(600 * seed)
    return RunOutcome(row=row.name, seed=seed, value=0.5, curve=(), summary={}, alone=False)


@pytest.mark.slow
def test_a_comparison_that_stops_waits_for_no_run_under_way_or_to_come(tmp_path: Path) -> None:
    jobs = [(ComparedRow(name="a", overrides=()), seed, tmp_path) for seed in range(5)]
    outcomes = run_in_parallel(at_once_or_in_minutes, jobs, 2)
    assert next(outcomes).seed == 0
    outcomes.close()  # type: ignore[attr-defined]
    assert not multiprocessing.active_children()
