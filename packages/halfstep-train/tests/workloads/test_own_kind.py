"""A custom Kind gets every command that its parts allow: examples/own_workload.py from the command line."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from command_line import run_command
from halfstep_train.bench.problem import build_problem, load_bench_config
from halfstep_train.workloads import load
from halfstep_train.workloads.base.sums import Means
from halfstep_train.workloads.classification.config import ResNetConfig, ViTConfig
from halfstep_train.workloads.language.build import get_model_size
from halfstep_train.workloads.language.config import LanguageConfig

EXAMPLE = "own_workload:KIND"
SMALL = ("train.max_steps=6", "train.batch_size=16", "data.num_workers=0", "device=cpu")


@pytest.fixture(autouse=True)
def example_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[4] / "examples")


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    code, out, err = run_command(capsys, *words)
    return code, out or err


def test_its_schema_is_read_shown_and_checked(capsys: pytest.CaptureFixture[str]) -> None:
    assert load(EXAMPLE, overrides=["model.width=7"]).config.model.width == 7  # type: ignore[attr-defined]
    code, text = run(capsys, "train", EXAMPLE, "--show-config")
    assert code == 0
    assert "model.width" in text
    code, text = run(capsys, "train", EXAMPLE, "model.widht=7")
    assert code == 2
    assert "model.width" in text


def test_it_trains_resumes_evaluates_and_predicts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, points, no_points = tmp_path / "run", tmp_path / "points.csv", tmp_path / "words.csv"
    points.write_text("1.0,0.0\n0.0,0.3\n")
    no_points.write_text("here,there\n")
    assert run(capsys, "train", EXAMPLE, "--out", str(out), *SMALL)[0] == 0
    assert run(capsys, "train", "--resume", str(out), "train.max_steps=8")[0] == 0
    out = out.rename(tmp_path / "moved")
    code, text = run(capsys, "evaluate", str(out), "--json")
    assert (code, "accuracy" in json.loads(text)["metrics"]) == (0, True)
    code, text = run(capsys, "predict", str(out), str(points), str(no_points), "--json")
    assert code == 1, "a file could not be used"
    found = json.loads(text)
    assert [moon in (0, 1) for moon in found["predictions"][0]["moons"]] == [True, True]
    assert (found["failed"][0]["file"], "'here'" in found["failed"][0]["why"]) == (str(no_points), True)


@pytest.mark.parametrize(("workload", "small"), [(EXAMPLE, True), ("tiny_workload:build", False)])
def test_without_made_up_data_a_bench_repeats_a_batch_of_its_own(workload: str, small: bool) -> None:
    problem = build_problem(load_bench_config(workload, [], {"batch_size": 16}, small=small), torch.device("cpu"))
    assert {len(tensor) for tensor in problem.host_batch.values()} == {16}
    assert problem.loss(problem.make_model(), problem.prepare(problem.host_batch)).isfinite()


def test_a_memory_plan_takes_it_with_its_demo_data(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = run(capsys, "plan", EXAMPLE, "--memory", "--gpu", "T4", "--mode", "eager", "--precision", "fp32")
    assert code == 0, text


def test_means_are_over_samples_whatever_the_batches() -> None:
    metrics = Means(size=lambda outputs, batch: outputs.abs())
    metrics.update(torch.tensor([1.0, -2.0, 3.0]), {})
    again = Means(size=lambda outputs, batch: outputs.abs())
    again.load_state_dict(metrics.state_dict())
    again.update(torch.tensor([-4.0]), {})
    assert again.compute() == {"size": 2.5}


CHANGED = """
import dataclasses

from halfstep_train.workloads import KINDS

GPT2, MEDIUM = KINDS["gpt2"], dataclasses.replace(KINDS["gpt2"], usual="gpt2_medium")
RESNET, VIT = KINDS["resnet18"], dataclasses.replace(KINDS["resnet18"], usual="vit_s_16")
"""
TEXT = ("model.depth=1", "model.heads=2", "model.dim=16", "model.context=8", "data.tokenizer=bytes")


@pytest.fixture
def changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "changed_kinds.py").write_text(CHANGED)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "changed_kinds", raising=False)


@pytest.mark.usefixtures("changed")
def test_a_familys_kind_at_an_import_path_is_its_usual_model() -> None:
    sizes = {"GPT2": 12, "MEDIUM": 24}
    assert {name: get_model_size(text_config(name), {"vocab": 9}).depth for name in sizes} == sizes
    assert isinstance(load("changed_kinds:RESNET").config, ResNetConfig)
    assert isinstance(load("changed_kinds:VIT").config, ViTConfig)


def text_config(name: str) -> LanguageConfig:
    config = load(f"changed_kinds:{name}", overrides=["data.dir=anywhere"]).config
    assert isinstance(config, LanguageConfig)
    return config


@pytest.mark.usefixtures("changed")
def test_a_familys_kind_at_an_import_path_trains_and_is_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, text = str(tmp_path / "run"), tmp_path / "text.txt"
    text.write_text("to be or not to be, that is the question. " * 10)
    words = ("train", "changed_kinds:MEDIUM", "--data-dir", str(text), "--out", out, *TEXT, *SMALL)
    assert run(capsys, *words)[0] == 0
    code, said = run(capsys, "evaluate", out, "--json")
    assert (code, "perplexity" in json.loads(said)["metrics"]) == (0, True)
    code, said = run(capsys, "predict", out, "--prompt", "to be", "--tokens", "3")
    assert code == 0, said
