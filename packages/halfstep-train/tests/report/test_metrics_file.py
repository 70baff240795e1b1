from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest

from halfstep.errors import CheckpointError
from halfstep_train.report.metrics_file import MetricsFile, cut_back, find_last_step, read


def write(path: Path, *steps: int) -> None:
    metrics = MetricsFile(path)
    for step in steps:
        metrics.append({"kind": "train", "step": step, "loss": 1 / step})
    metrics.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


def test_floats_come_back_as_the_same_bits(path: Path) -> None:
    values = {"a": 0.1 + 0.2, "b": 5e-324, "c": -0.0, "d": 1.7976931348623157e308, "e": 1e-3}
    metrics = MetricsFile(path)
    metrics.append(values)
    metrics.close()
    (found,) = read(path)
    assert {name: value.hex() for name, value in found.items()} == {name: v.hex() for name, v in values.items()}


def test_values_that_are_not_finite_are_valid_json_and_come_back(path: Path) -> None:
    metrics = MetricsFile(path)
    metrics.append({"loss": math.nan, "up": math.inf, "down": -math.inf, "many": [math.nan, 1.0], "name": "a"})
    metrics.close()
    assert json.loads(path.read_text(), parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    (found,) = read(path)
    assert math.isnan(found["loss"])
    assert (found["up"], found["down"], found["name"]) == (math.inf, -math.inf, "a")


def test_cutting_back_drops_what_came_after_the_checkpoint_and_keeps_the_rest_byte_for_byte(path: Path) -> None:
    write(path, 1, 2, 3)
    kept = path.read_bytes()
    write(path, 4, 5)
    cut_back(path, 3)
    assert path.read_bytes() == kept
    assert find_last_step(path) == 3


def test_a_resumed_run_appends_to_the_file_that_was_cut(path: Path) -> None:
    metrics = MetricsFile(path)
    write(path, 1, 2, 3)
    cut_back(path, 1)
    metrics.append({"kind": "train", "step": 2, "loss": 7.0})
    metrics.close()
    assert [(r["step"], r["loss"]) for r in read(path)] == [(1, 1.0), (2, 7.0)]


def test_a_kill_at_any_byte_of_the_last_line_loses_that_line_only(path: Path) -> None:
    write(path, 1, 2)
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    for length in range(first, len(whole) - 1):
        path.write_bytes(whole[:length])
        assert [record["step"] for record in read(path)] == [1]
        cut_back(path, 2)
        assert path.read_bytes() == whole[:first]


def test_a_damaged_line_in_the_middle_is_an_error_that_names_it(path: Path) -> None:
    write(path, 1, 2, 3)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + b"\0\0\0\n" + lines[2])
    with pytest.raises(CheckpointError, match="line 2 of"):
        read(path)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full: this was NOT tested")
def test_a_full_disk_is_a_clear_error_and_closing_afterwards_is_none() -> None:
    metrics = MetricsFile(Path("/dev/full"))
    with pytest.raises(CheckpointError, match="No space left"):
        metrics.append({"step": 1})
    metrics.close()
