"""What the zoo makes of its rows: verdicts, merged calls and tables. The models train in benchmarks/zoo.py."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import zoo
from halfstep_train.use.compare import ComparedRow, CompareRequest, Comparison, RunOutcome


def make_run(*, loss: float = 1.0, weight: float = 1.0, **more: Any) -> Any:
    settings = {
        "problem": "", "kind": "", "mode": "graph", "certificate": "3 tensors bit-equal", "lines": [], "warnings": [],
        "trace": "", "mean_loss": loss, "losses": [loss] * 3, "state": {"weight": torch.tensor([weight])}, **more,
    }  # fmt: skip
    return SimpleNamespace(**settings)


def judge(
    way: str, run: Any, *, off: Any = None, again: Any = None, others: tuple[Any, ...] = (), later: Any = None
) -> str:
    """Judge a run; from other weights and batches, `later` (the same run unless given) is what the way gives."""
    arguments = argparse.Namespace(steps=3, device="cuda", limit=1.0)
    comparison = zoo.Comparison("own_mlp", arguments, report=None)
    comparison.other_runs = {start: list(others) for start in range(zoo.NUM_STARTS)}
    off = off or make_run()
    comparison.begin = lambda way: None  # type: ignore[method-assign]  # it would start a timer
    comparison.train = lambda way, **_: off if way == "off" else later or run  # type: ignore[method-assign]
    verdict: str = comparison.judge(way, off, again or off, run)["verdict"]
    return verdict


FIXED = (make_run(), make_run(), make_run(loss=1.1))  # two seeds without random numbers, and fp32
RANDOM = (make_run(loss=1.3), make_run(loss=0.8), make_run(loss=1.01))


@pytest.mark.parametrize(
    ("run", "others", "verdict"),
    [
        (make_run(), (), "bit-equal"),
        (make_run(mode="eager", lines=["halfstep: runs eagerly: a reason"]), (), "eager: runs eagerly: a reason"),
        (make_run(mode="eager"), (), "SILENT"),
        (make_run(mode="eager", weight=2.0, lines=["halfstep: runs eagerly: a reason"]), (), "DIFFERS"),
        (make_run(weight=1.1), FIXED, "DIFFERS"),
        (make_run(weight=1.1, loss=1.05, certificate="2 tensors equal up to rounding"), FIXED, "up to rounding"),
        (make_run(weight=1.1, loss=1.2, certificate="2 tensors equal up to rounding"), FIXED, "up to rounding"),
        (make_run(weight=1.1, loss=1.2, mode="compile+graph"), FIXED, "DIFFERS"),
        (make_run(weight=1.1, loss=1.2, mode="compile+graph"), RANDOM, "within the bound"),
        (make_run(weight=1.1, loss=float("nan"), mode="compile+graph"), RANDOM, "DIFFERS"),
        (make_run(problem="ValueError: no", kind="RAISED"), (), "RAISED"),
    ],
)
def test_a_verdict_follows_from_mode_bytes_and_loss(run: Any, others: Any, verdict: str) -> None:
    assert judge("graph", run, others=others) == verdict


def test_compiled_code_beyond_the_bound_is_judged_by_the_mean_over_eight_starts() -> None:
    far, near = (make_run(weight=1.1, loss=loss, mode="compile+graph") for loss in (1.2, 1.01))
    assert judge("compile", far, others=FIXED, later=near) == "within the bound"
    assert judge("compile", far, others=FIXED, later=far) == "DIFFERS"


def test_where_two_runs_of_off_differ_captured_ones_may_as_much() -> None:
    again = make_run(weight=1.01)
    assert judge("graph", make_run(weight=1.02), again=again) == "within off's spread"
    assert judge("graph", make_run(weight=1.5), again=again, others=FIXED) == "DIFFERS"


def test_rows_of_several_calls_are_merged_way_by_way() -> None:
    first = {
        "a": {"package": "own", "commit": "1", "ways": {"off": {"verdict": "trained"}, "graph": {"verdict": "HANG"}}}
    }
    second = {"a": {"package": "own", "commit": "2", "ways": {"graph": {"verdict": "bit-equal"}}}, "b": {"ways": {}}}
    merged = zoo.merge(first, second)
    assert list(merged) == ["a", "b"]
    assert merged["a"]["commit"] == "2"
    assert {way: found["verdict"] for way, found in merged["a"]["ways"].items()} == {
        "off": "trained",
        "graph": "bit-equal",
    }


def test_the_table_counts_every_model_once() -> None:
    verdicts = ["bit-equal", "eager: runs eagerly: a reason", "up to rounding", "DIFFERS", "within off's spread"]
    rows = {
        str(i): {"package": "own", "ways": {"off": {"verdict": "trained"}, "graph": {"verdict": verdict}}}
        for i, verdict in enumerate(verdicts)
    }
    rows["missing"] = {"package": "timm", "ways": {"off": {"verdict": "not installed: No module named 'timm'"}}}
    lines = zoo.make_table(rows).splitlines()
    assert lines[2].split("|")[2:-1] == [f" {number or ''} " for number in (6, 1, 1, 1, 1, 0, 1, 1)]
    assert [line.split("|")[1].strip() for line in lines[2:]] == ['`fast="graph"`', "timm", "written here"]


# --- records of a parity benchmark ---

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
