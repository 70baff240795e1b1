"""What a Kind says of itself reaches the commands: options, no input, export, the unit of throughput."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from command_line import run_command
from halfstep_train.run.folder import flatten_settings
from halfstep_train.run.train import train
from halfstep_train.workloads import KINDS, load

DRAWING = "drawing_workload:KIND"
SMALL = ("train.batch_size=4", "data.num_workers=0", "device=cpu", "train.report_every=1", "ema.enabled=true")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("drawing") / "run"
    return train(load(DRAWING, overrides=["train.max_steps=3", "log.quiet=true", *SMALL]), out=out)


def called(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    code, out, err = run_command(capsys, *words)
    return code, out + err


def test_predict_without_input_takes_the_workloads_options(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "drawn"
    code, text = called(capsys, "predict", str(run), "--num", "3", "--style=oil", "--loud", "--out", str(out))
    assert code == 0, text
    assert "Predicting 3/3" in text
    drawn = [json.loads((out / f"{k}.json").read_text()) for k in range(3)]
    assert [style for style, *_ in drawn] == ["oil"] * 3


def test_defaults_count_and_the_folder_is_the_runs_own(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = called(capsys, "predict", str(run), "--json")
    assert code == 0, text
    assert len(list((run / "predictions").glob("?.json"))) == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--nmu", "3"), "did you mean --num"),
        (("--num", "few"), "--num few: expected a whole number"),
        (("--num", "0"), "it must be at least 1"),
        (("--num",), "Option '--num' requires an argument"),
        (("--loud=yes",), "Option '--loud' does not take a value"),
        (("--top-k", "3"), "drawing_workload:KIND has no option --top-k 3"),
        (("photo.png",), "photo.png: drawing_workload:KIND takes no input files"),
    ],
)
def test_a_wrong_option_or_an_input_is_refused_with_what_the_workload_takes(
    run: Path, words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, text = called(capsys, "predict", str(run), *words)
    assert (code, said in " ".join(text.split())) == (2, True), text


def test_help_for_a_run_shows_its_workloads_options_alone(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = called(capsys, "predict", str(run), "--help")
    assert code == 0
    assert "--num INT" in " ".join(text.split())
    assert "--tile" not in text
    assert "--draws INT" in " ".join(called(capsys, "evaluate", str(run), "--help")[1].split())
    assert "--tile" in called(capsys, "predict", "--help")[1]


def test_evaluate_passes_options_and_validates_where_they_ask_for_nothing(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def metrics(*words: str) -> dict[str, float]:
        code, text = called(capsys, "evaluate", str(run), "--json", *words)
        assert code == 0, text
        found: dict[str, float] = json.loads(text[text.index("{") : text.rindex("}") + 1])["metrics"]
        return found

    assert metrics("--draws", "4") == {"drawn": 4.0}
    assert "accuracy" in metrics()


def test_the_best_weights_are_exported_when_training_ends_and_again_after_a_longer_run(run: Path) -> None:
    written = torch.load(run / "model" / "weights.pt", weights_only=True)
    about = json.loads((run / "model" / "about.json").read_text())
    assert about == {"device": "cpu", "classes": ["a", "b", "c"]}
    train(load(str(run / "config.yaml"), overrides=["train.max_steps=6", "log.quiet=true"]), resume=run)
    longer = torch.load(run / "model" / "weights.pt", weights_only=True)
    assert written.keys() == longer.keys()
    assert not list(run.glob(".model-*"))


def test_throughput_is_told_in_the_familys_unit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = train(load(DRAWING, overrides=["train.max_steps=6", *SMALL]), out=tmp_path / "run")
    text = capsys.readouterr().out
    assert " pixels/s, validation included" in text
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    rates = [(r["samples_per_s"], r["pixels_per_s"]) for r in records if r["kind"] == "train"]
    assert rates
    assert all(pixels == pytest.approx(64 * samples, rel=0.01) for samples, pixels in rates)


@pytest.mark.parametrize("workload", list(KINDS))
def test_what_a_run_keeps_are_settings_that_it_has(workload: str) -> None:
    names = list(flatten_settings(load(workload).config))
    assert [kept for kept in KINDS[workload].kept if not any(name.startswith(kept) for name in names)] == []
