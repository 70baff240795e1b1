"""Data folders as users type them: relative, with `~`, from another working folder later."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from halfstep.disk import make_absolute, normalise_path
from halfstep_train.config.schema import ModelConfig, RunConfig
from halfstep_train.config.section import FilePath
from halfstep_train.run.folder import make_paths_absolute
from halfstep_train.run.train import train
from halfstep_train.use.evaluate import evaluate
from halfstep_train.workloads import load
from halfstep_train.workloads.segmentation.demo import write_demo
from tiny_runs import Told, unet_run


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder and home with data in it."""
    write_demo(tmp_path / "pictures", num_images=8, side=32)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("typed", ["pictures", "~/pictures/../pictures"])
def test_a_run_stores_the_absolute_folder_and_is_used_from_anywhere(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], typed: str
) -> None:
    folder = unet_run(
        Path("run"), {"data.dir": typed, "log.quiet": False, "train.batch_size": 2, "data.num_workers": 0}
    )
    assert f"{home / 'pictures'} (data.dir=" in capsys.readouterr().out
    assert load(str(folder / "config.yaml")).config.data.dir == str(home / "pictures")
    (home / "elsewhere").mkdir()
    monkeypatch.chdir(home / "elsewhere")
    told = Told(home)
    assert evaluate(home / "run", report=told.report).data == str(home / "pictures")
    train(load(str(home / "run" / "config.yaml"), overrides=["train.max_steps=7"]), resume=home / "run")


def test_what_only_an_own_workload_understands_is_left_alone(home: Path) -> None:
    for value in ("cifar10", "s3://bucket/images"):
        assert (
            make_paths_absolute(load("tiny_workload:build", overrides=[f"data.dir={value}"]).config).data.dir == value
        )
    there = make_paths_absolute(load("tiny_workload:build", overrides=["data.dir=pictures"]).config)
    assert there.data.dir == str(home / "pictures")


def test_parts_of_a_model_are_found_from_anywhere_and_words_stay_words(home: Path) -> None:
    for name in ("first", "swin.pth"):
        (home / name).mkdir()
    config = load("radiodiff", overrides=["model.vae=first", "model.pyramid.weights=swin.pth"]).config
    found: Any = make_paths_absolute(config)
    assert (found.model.vae, found.model.pyramid.weights) == (str(home / "first"), str(home / "swin.pth"))
    words = load("slotcontrast", overrides=["model.backbone_weights=random"]).config
    assert make_paths_absolute(words) == words
    missing = load("diffusion", overrides=["model.vae=nowhere"]).config
    assert make_paths_absolute(missing) == missing


class TaughtModel(ModelConfig):
    teacher: FilePath = None
    name: str | None = None


class TaughtConfig(RunConfig):
    model: TaughtModel = TaughtModel()


def test_a_setting_of_ones_own_that_names_a_file_is_found_from_anywhere(home: Path) -> None:
    (home / "teacher.pt").touch()
    model = TaughtModel(teacher="teacher.pt", name="teacher.pt")
    found: Any = make_paths_absolute(TaughtConfig(workload="own:KIND", model=model)).model
    assert (found.teacher, found.name) == (str(home / "teacher.pt"), "teacher.pt")


def test_a_link_keeps_its_meaning_and_its_name(home: Path) -> None:
    (home / "far" / "inner").mkdir(parents=True)
    (home / "link").symlink_to("far/inner")
    assert normalise_path("link/../d") == "link/../d"  # far/d
    assert normalise_path("pictures/../link/d") == "link/d"
    assert make_absolute("pictures/.././new") == home / "new"
