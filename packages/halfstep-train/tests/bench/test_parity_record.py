"""What a parity benchmark stores after each pair of runs: hours of training hang on it."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import pytest

from halfstep_train.use.compare import Comparison
from halfstep_train.use.compare_run import ComparedRow, CompareRequest, RunOutcome

BENCHMARKS = Path(__file__).resolve().parents[4] / "benchmarks"
SEEDS = range(5)


def outcome(row: str, seed: int, value: float) -> RunOutcome:
    return RunOutcome(row=row, seed=seed, value=value, curve=(), summary={"skipped": 0}, alone=True)


def with_runs(folder: Path, values: dict[str, list[float]]) -> Comparison:
    for row, found in values.items():
        for seed, value in enumerate(found):
            run = folder / "runs" / f"{row}-{seed}"
            run.mkdir(parents=True)
            (run / "metrics.jsonl").write_text(json.dumps({"kind": "val", "loss": value}) + "\n")
    rows = tuple(ComparedRow(name=name, overrides=()) for name in values)
    request = CompareRequest(
        target="unet", overrides=(), rows=rows, seeds=len(SEEDS), margin=0.1, at_once=1, best=False
    )
    runs = [outcome(row, seed, value) for row, found in values.items() for seed, value in enumerate(found)]
    return Comparison(request=request, runs=runs)


def test_a_stored_parity_says_verdict_interval_and_how_many_seeds_were_paired(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setattr(sys, "argv", ["benchmarks/some_parity.py"])
    import parity

    fp32 = [1.0 + 0.01 * seed for seed in SEEDS]
    comparison = with_runs(tmp_path, {"fp32": fp32, "bf16": [value + 0.001 for value in fp32]})
    arguments = argparse.Namespace(name="some_parity", out=str(tmp_path), data="pictures")
    parity.keep(arguments, tmp_path, comparison, ())

    stored = json.loads((tmp_path / "some_parity.json").read_text())
    found = stored["verdicts"]["bf16"]
    assert found["verdict"].startswith("same")
    assert found["seeds"] == len(SEEDS)
    assert found["interval_90"][0] <= found["mean_difference"] <= found["interval_90"][1]
    assert [run["loss"] for run in stored["runs"]["fp32"]] == fp32
