"""A Kind of the user's own gets every command that its parts allow: examples/own_workload.py by the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from halfstep.bench.problem import problem_for
from halfstep.bench.settings import bench_config
from halfstep.cli.main import main
from halfstep.workloads import KINDS, load

EXAMPLE = "own_workload:KIND"
SMALL = ("train.max_steps=6", "train.batch_size=16", "data.num_workers=0", "device=cpu")


@pytest.fixture(autouse=True)
def example_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "examples")


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        main(list(words))
    said = capsys.readouterr()
    return int(end.value.code or 0), said.out or said.err


def test_its_schema_is_read_shown_and_checked(capsys: pytest.CaptureFixture[str]) -> None:
    assert load(EXAMPLE, overrides=["model.width=7"]).config.model.width == 7  # type: ignore[attr-defined]
    code, text = run(capsys, "train", EXAMPLE, "--show-config")
    assert code == 0
    assert "model.width" in text
    code, text = run(capsys, "train", EXAMPLE, "model.widht=7")
    assert code == 2
    assert "model.width" in text


def test_it_trains_resumes_evaluates_predicts_and_benches(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, points = tmp_path / "run", tmp_path / "points.csv"
    points.write_text("1.0,0.0\n0.0,0.3\n")
    assert run(capsys, "train", EXAMPLE, "--out", str(out), *SMALL)[0] == 0
    assert run(capsys, "train", "--resume", str(out), "train.max_steps=8")[0] == 0
    code, text = run(capsys, "evaluate", str(out), "--json")
    assert (code, "accuracy" in json.loads(text)["metrics"]) == (0, True)
    code, text = run(capsys, "predict", str(out), str(points))
    assert code == 0, text
    problem = problem_for(bench_config(EXAMPLE, [], {"batch_size": 4}, small=True), torch.device("cpu"))
    assert problem.loss(problem.make_model(), problem.prepare(problem.host_batch)).isfinite()


def test_a_part_it_does_not_have_is_refused_by_name() -> None:
    assert KINDS.of("tiny_workload:build").predictor is None
    assert KINDS.of(EXAMPLE).guide is None
