"""Resuming what need not, or cannot, be resumed; and what is not part of a run."""

from __future__ import annotations

import os
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from halfstep.disk import make_absolute, normalise_path
from halfstep.errors import CheckpointError
from halfstep_train.cli.main import main
from halfstep_train.cli.report import write_report
from halfstep_train.config.schema import ModelConfig, RunConfig
from halfstep_train.config.section import FilePath
from halfstep_train.report.page.read_run import read_run
from halfstep_train.run.checkpoint import Checkpoint, Checkpoints
from halfstep_train.run.folder import RunFolder, make_paths_absolute
from halfstep_train.run.train import train
from halfstep_train.use.evaluate import evaluate, load_weights, open_run
from halfstep_train.workloads import load
from halfstep_train.workloads.segmentation.demo import write_demo
from tiny_runs import Told, unet_run
from tiny_workload import Net
from whole_runs import newest, records, resume, run, stored_lines


def test_a_finished_run_says_so_and_how_to_go_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run(tmp_path / "run", {"train.epochs": 2})
    capsys.readouterr()
    with pytest.raises(SystemExit) as stopped:
        main(["train", "--resume", str(folder)])
    assert not stopped.value.code
    said = capsys.readouterr().out
    assert said == f"{folder} is finished after 2 of 2 epochs; to continue, add train.epochs=4 to the command\n"
    with pytest.raises(SystemExit):
        main(["train", "--resume", str(folder), "lr=0.5", "--allow-changes"])
    assert capsys.readouterr().out.endswith("; nothing was trained with optimizer.lr\n")
    with pytest.raises(CheckpointError, match=r"has trained 2 epochs, not train.epochs=1"):
        resume(folder, "train.epochs=1")
    resume(folder, "train.epochs=4")
    assert newest(folder).state["step"]["attempted"] == 24


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"train.max_steps": 3, "train.epochs": 100},
            "finished after 3 of 3 steps; to continue, add train.max_steps=6 to the command, or 0 for all 100 epochs",
        ),
        (
            {"train.early_stopping_patience": 1, "optimizer.lr": 1e-12},
            "finished by early stopping after 2 of 100 epochs; to continue, add train.early_stopping_patience=0",
        ),
    ],
)
def test_other_ends_are_named_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], settings: dict[str, object], said: str
) -> None:
    folder = run(tmp_path / "run", settings)
    before = stored_lines(folder)
    capsys.readouterr()
    resume(folder)
    assert said in capsys.readouterr().out
    assert stored_lines(folder) == before


def test_a_run_from_a_device_that_is_not_here_names_the_flag_to_go_on(tmp_path: Path) -> None:
    folder = run(tmp_path / "run", {"train.max_steps": 2})
    stored = RunFolder(folder)
    stored.write_plan(replace(stored.read_plan(), device="cuda:5"))
    with pytest.raises(CheckpointError, match="trained on cuda:5") as refused:
        resume(folder, "train.max_steps=3")
    assert "--device cpu --allow-changes" in refused.value.fix or "--device cuda:0" in refused.value.fix


def test_quiet_is_for_one_call_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run(tmp_path / "run", {"train.epochs": 1, "log.quiet": True})
    assert not load(str(folder / "config.yaml")).config.log.quiet
    capsys.readouterr()
    resume(folder, "train.epochs=2")
    assert "Epoch 2/2" in capsys.readouterr().out
    resume(folder, "train.epochs=3", "log.quiet=true")
    said = capsys.readouterr().out
    assert "Epoch 3/3" not in said
    assert not load(str(folder / "config.yaml")).config.log.quiet


def test_checkpoint_files_have_the_mode_of_any_other_file(tmp_path: Path) -> None:
    former = os.umask(0o027)
    try:
        whole = Checkpoint(model={"w": torch.ones(2)}, ema={}, state={})
        path = Checkpoints(tmp_path).save(1, whole)
    finally:
        os.umask(former)
    assert {stat.S_IMODE(file.stat().st_mode) for file in path.iterdir()} == {0o640}


def test_a_stored_run_is_used_with_the_buffers_that_state_dict_leaves_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import tiny_workload

    class Counting(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(()), persistent=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.training:
                self.seen += 1
            return super().forward(x)

    monkeypatch.setattr(tiny_workload, "Net", Counting)
    folder = run(tmp_path / "run", {"train.max_steps": 3})
    opened = open_run(folder, checkpoint="last")
    plan = RunFolder(folder).read_plan()
    assert load_weights(opened, Counting(), plan).get_buffer("seen") == 3


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_every_step_of_a_short_run_has_its_own_line_of_metrics(tmp_path: Path, steps: int) -> None:
    """Facts come two steps later, and for the last ones at the epoch's end: none is lost, none moved."""
    folder = run(tmp_path / "short", {"train.max_steps": steps, "schedule.name": "linear", "schedule.warmup_steps": 0})
    lines = [record for record in records(folder) if record["kind"] == "train"]
    assert [line["step"] for line in lines] == list(range(1, steps + 1))
    rates = [line["lr"] for line in lines]
    assert rates == sorted(set(rates), reverse=True)
    many = run(tmp_path / "asked", {"train.max_steps": steps, "train.report_every": 3})
    steps_of_many = [record["step"] for record in records(many) if record["kind"] == "train"]
    assert steps_of_many == [step for step in range(1, steps + 1) if step % 3 == 0 or step < 3]


# --- damaged files of a run ---

OTHER = ("[7]", '{"other": []}')
BOMB = "[" * 100_000 + "]" * 100_000
"""Nested too deeply for a recursive reader."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(tmp_path_factory.mktemp("files") / "run", {"train.epochs": 1})


def test_a_run_goes_on_without_the_record_of_its_data(trained: Path) -> None:
    for epochs, text in enumerate((*OTHER, BOMB), start=newest(trained).state["position"]["epoch"] + 1):
        (trained / "data.json").write_text(text)
        resume(trained, f"train.epochs={epochs}")
        assert newest(trained).state["position"]["epoch"] == epochs


def test_a_run_does_not_go_on_without_knowing_its_best_checkpoint(trained: Path) -> None:
    """It would drop that one as an old one."""
    file = trained / "checkpoints" / "best.json"
    written = file.read_text()
    for text in (*OTHER, BOMB):
        file.write_text(text)
        with pytest.raises(CheckpointError, match=r"best.json cannot be read"):
            resume(trained, "train.epochs=9")
    file.write_text(written)


@pytest.mark.parametrize("name", ["plan.json", "settled.json"])
def test_a_plan_and_settings_that_are_not_as_written_are_named_with_their_file(trained: Path, name: str) -> None:
    written = (trained / name).read_text()
    for text in (*OTHER, BOMB, written[:-5], written.replace("fp32", "bf16", 1)):
        (trained / name).write_text(text)
        with pytest.raises(CheckpointError, match=rf"cannot use .*{name}") as refused:
            resume(trained, "train.epochs=9")
        assert "config.yaml" in refused.value.fix
    (trained / name).write_text(written)


@pytest.mark.parametrize("name", ["summary.json", "config.json"])
def test_a_page_of_a_run_names_the_file_that_is_no_record(tmp_path: Path, name: str) -> None:
    folder = run(tmp_path / "run", {"train.epochs": 1})
    (folder / "report" / name).write_text('"text"')
    with pytest.raises(CheckpointError, match=name) as refused:
        read_run(folder)
    assert "remove it" in refused.value.fix


def test_an_edit_of_the_config_that_changes_a_step_is_refused_unless_it_is_allowed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run(tmp_path / "run", {"train.epochs": 1, "optimizer.lr": 0.001})
    config = folder / "config.yaml"
    config.write_text(config.read_text().replace("lr: 0.001", "lr: 0.002").replace("epochs: 1", "epochs: 2"))
    with pytest.raises(CheckpointError, match=r"config\.yaml was edited: optimizer\.lr: 0\.001 -> 0\.002") as refused:
        resume(folder)
    assert "put them back, or accept them with --allow-changes" in refused.value.fix
    resume(folder, "log.quiet=false", allow_changes=True)
    said = capsys.readouterr().out
    assert "optimizer.lr: 0.001 -> 0.002" in said
    assert "train.epochs: 1 -> 2" in said
    resume(folder, "train.epochs=3")  # accepted once, the edit is the run's own setting
    assert newest(folder).state["position"]["epoch"] == 3


def test_a_config_that_names_another_workload_is_refused(tmp_path: Path) -> None:
    folder = run(tmp_path / "run", {"train.epochs": 1})
    config = folder / "config.yaml"
    config.write_text(config.read_text().replace("tiny_workload:build", "drawing_workload:build_sampling"))
    with pytest.raises(CheckpointError, match="was edited: workload: tiny_workload:build -> drawing"):
        resume(folder, "train.epochs=2", allow_changes=True)


def test_a_record_that_is_nested_too_deeply_is_named_with_its_line(tmp_path: Path) -> None:
    folder = run(tmp_path / "run", {"train.epochs": 1})
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(f"{BOMB}\n{{}}\n")
    with pytest.raises(CheckpointError, match=r"line \d+ of .*metrics.jsonl is not a record"):
        read_run(folder)


def test_a_link_in_a_run_folder_is_replaced_and_what_it_names_stays(tmp_path: Path) -> None:
    folder = run(tmp_path / "run", {"train.epochs": 1})
    names = (
        "config.yaml",
        "plan.json",
        "settled.json",
        "metrics.jsonl",
        "report/summary.json",
        "checkpoints/best.json",
    )
    named = {name: tmp_path / name.replace("/", "-") for name in names}
    for name, file in named.items():
        (folder / name).rename(file)
        (folder / name).symlink_to(file)
    (tmp_path / "thesis.txt").write_text("years of work")
    (folder / ".lock").unlink(missing_ok=True)
    for name in (".lock", "report/report.html"):
        (folder / name).symlink_to(tmp_path / "thesis.txt")
    before = {name: file.read_bytes() for name, file in named.items()}
    resume(folder, "train.epochs=2", "train.early_stopping_patience=9")
    write_report([folder], None)
    assert {name: file.read_bytes() for name, file in named.items()} == before
    assert (tmp_path / "thesis.txt").read_text() == "years of work"
    assert not [name for name in (*names, "report/report.html") if (folder / name).is_symlink()]


# --- data folders: relative, with `~`, used from another working folder ---


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
