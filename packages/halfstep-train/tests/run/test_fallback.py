"""bf16 on a GPU without it: the run goes on in fp16 and says so once, or refuses under strict."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from colour_threshold import best_threshold_iou
from fake_driver import T4, FakeDriver
from halfstep.errors import HardwareError
from halfstep_train.report.metrics_file import read
from halfstep_train.report.page.read_run import read_run
from halfstep_train.run.train import train
from halfstep_train.workloads import load
from halfstep_train.workloads.segmentation.demo import write_demo

WARNING = "bf16 requested, running fp16 with loss scaling: Tesla T4 only emulates bf16"
TINY = {"data.dir": "anywhere", "data.num_workers": 0, "train.batch_size": 4, "train.max_steps": 4, "precision": "bf16",
        "train.report_every": 1}  # fmt: skip


@pytest.fixture
def turing_is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Tesla T4 as the driver reports one, but for its address: torch must find something to compute on."""
    monkeypatch.setattr("halfstep.hardware.probe.Driver", lambda: FakeDriver(dataclasses.replace(T4, device="cpu")))


def run(out: Path, **more: object) -> Path:
    settings = {**TINY, **more}
    return train(load("tiny_workload:build", overrides=[f"{k}={json.dumps(v)}" for k, v in settings.items()]), out=out)


@pytest.mark.usefixtures("turing_is_here")
@pytest.mark.parametrize("quiet", [False, True])
def test_a_run_falls_back_warns_once_and_trains_with_loss_scaling(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], quiet: bool
) -> None:
    folder = run(tmp_path / "run", **{"log.quiet": quiet})
    said = " ".join(capsys.readouterr().err.split())
    assert said.count(f"warning: {WARNING}") == 1
    stored = json.loads((folder / "plan.json").read_text())
    assert (stored["asked"], stored["granted"], stored["warnings"]) == ("bf16", "fp16", [WARNING])
    scales = [record["scale"] for record in read(folder / "metrics.jsonl") if record["kind"] == "train"]
    assert min(scales) > 1


@pytest.mark.usefixtures("turing_is_here")
def test_a_strict_run_refuses_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(HardwareError, match="bf16 was requested, but Tesla T4 only emulates bf16"):
        run(tmp_path / "run", **{"precision.strict": True})
    assert not (tmp_path / "run").exists()


# --- --quiet keeps warnings ---

SMALL = ["data.image_size=16", "model.base_channels=2", "model.depth=1", "train.batch_size=2", "train.max_steps=1",
         "data.num_workers=0", "device=cpu"]  # fmt: skip


def test_quiet_does_not_hide_what_was_left_out_or_taken_otherwise(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_demo(tmp_path / "data", num_images=8, side=16)
    bad = sorted((tmp_path / "data" / "imgs").iterdir())[3]
    bad.write_bytes(b"no picture")
    overrides = [*SMALL, f"data.dir={tmp_path / 'data'}", "data.on_bad_file=skip"]
    train(load("unet", flags={"precision_type": "fp16", "quiet": True}, overrides=overrides), out=tmp_path / "run")
    said = capsys.readouterr()
    assert f"warning: left out: cannot read {bad}" in said.err
    assert "warning: `--precision-type fp16` is read as precision=fp16" in said.err
    assert "warning" not in said.out


# --- the demo as a new user meets it: one command without data ---


def test_the_first_steps_of_a_demo_learn_from_data_that_no_colour_threshold_explains(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = ["train.max_steps=8", "train.validate_every_steps=4"]
    shortened = load("unet", flags={"device": "cpu", "quiet": True}, overrides=few)
    folder = train(shortened, out=tmp_path / "demo")
    assert "this is the DEMO" in capsys.readouterr().err.replace("\n", " ")
    first, last = (r["loss"] for r in read(folder / "metrics.jsonl") if r["kind"] == "val")
    assert last < first
    assert best_threshold_iou(folder / "data") < 0.6
    assert read_run(folder).settings["data.dir"] == (str(folder / "data"), "default generated demo data")
