"""Runs that end before their time: no folder that cannot be resumed, advice that holds, files by their names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from halfstep.disk import DRY_PREFIX
from halfstep.errors import CheckpointError, DataError, HalfstepError, TrainingStopped
from halfstep_train.cli.main import main
from halfstep_train.run.folder import suggest_resume
from halfstep_train.run.train import train
from halfstep_train.workloads import load
from halfstep_train.workloads.segmentation.demo import write_demo
from whole_runs import events, newest, resume, run, small_disk

SMALL = {"data.image_size": 16, "model.base_channels": 2, "model.depth": 1, "train.batch_size": 2, "device": "cpu",
         "log.quiet": True,
         "data.num_workers": 0, "precision.default": "fp32", "data.val_fraction": 0.25}  # fmt: skip


def unet(out: Path, data: Path, **more: Any) -> Path:
    settings = {**SMALL, "data.dir": str(data), **{key.replace("__", "."): value for key, value in more.items()}}
    return train(load("unet", overrides=[f"{key}={json.dumps(value)}" for key, value in settings.items()]), out=out)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    write_demo(tmp_path / "data", num_images=8, side=16)
    return tmp_path / "data"


def cut_short(path: Path) -> bytes:
    """A PNG whose header is fine and whose pixels are not there: found only when it is read."""
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    return whole


def test_a_start_that_fails_at_the_first_batch_leaves_nothing_and_can_be_repeated(data: Path, tmp_path: Path) -> None:
    images = sorted((data / "imgs").iterdir())
    whole = {path: cut_short(path) for path in images}
    with pytest.raises(DataError, match="cannot read") as failed:
        unet(tmp_path / "run", data)
    assert "--resume" not in str(failed.value)
    assert "same command" in failed.value.fix
    assert not (tmp_path / "run").exists()
    for path, content in whole.items():
        path.write_bytes(content)
    unet(tmp_path / "run", data, train__max_steps=1)


def test_a_disk_too_full_for_the_demo_leaves_no_folder(tmp_path: Path) -> None:
    with small_disk(1 << 10), pytest.raises(OSError, match="File too large"):
        train(load("unet", flags={"device": "cpu", "quiet": True}), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("split", ["train", "val"])
def test_a_bad_file_in_mid_run_keeps_what_was_trained_and_the_advice_holds(
    data: Path, tmp_path: Path, split: str
) -> None:
    order = files_in_order(data)
    bad = data / "imgs" / (order["train"][-1] if split == "train" else order["val"][0])
    content = cut_short(bad)
    with pytest.raises(DataError, match=bad.name) as failed:
        unet(tmp_path / "run", data, train__epochs=2)
    assert f"halfstep train --resume {tmp_path / 'run'}" in failed.value.fix
    assert newest(tmp_path / "run").state["step"]["attempted"] > 0
    bad.write_bytes(content)
    resume(tmp_path / "run")
    assert newest(tmp_path / "run").state["step"]["attempted"] == 6


def files_in_order(data: Path) -> dict[str, list[str]]:
    """The names of the first epoch's training images as they come, and of the validation images."""
    from halfstep_train.data.loader import Loader
    from halfstep_train.run.assemble import build_workload

    overrides = [f"{key}={json.dumps(value)}" for key, value in {**SMALL, "data.dir": str(data)}.items()]
    workload = build_workload(load("unet", overrides=overrides).config)
    batches = Loader(workload.train_samples, batch_size=2).iterate_epoch(0)
    indices = [int(index) for batch in batches for index in batch["index"]]
    return {
        "train": [workload.train_samples.name_of(index) for index in indices],  # type: ignore[attr-defined]
        "val": [workload.val_samples.name_of(index) for index in range(len(workload.val_samples))],  # type: ignore[attr-defined]
    }


def test_an_error_of_ones_own_code_before_the_first_step_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import tiny_workload

    monkeypatch.setattr(tiny_workload.Samples, "sample", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(tmp_path / "run", {})
    assert not (tmp_path / "run").exists()


def test_a_folder_that_was_killed_before_its_first_checkpoint_is_not_advised_to_be_resumed(tmp_path: Path) -> None:
    folder = run(tmp_path / "run", {"train.max_steps": 1})
    for path in sorted((folder / "checkpoints").rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    with pytest.raises(CheckpointError, match="not empty") as refused:
        run(tmp_path / "run", {})
    assert "--resume" not in refused.value.fix
    with pytest.raises(HalfstepError, match="no usable checkpoint") as nothing:
        resume(folder)
    assert "before its first" in nothing.value.why
    assert f"halfstep train {folder / 'config.yaml'} --out" in nothing.value.fix


def test_skipped_steps_and_the_end_of_a_run_name_the_files(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import halfstep_train.workloads.segmentation.build as workload

    monkeypatch.setattr(workload, "segmentation_loss", lambda logits, *_, **__: logits.sum() * float("nan"))
    with pytest.raises(TrainingStopped) as stopped:
        unet(tmp_path / "run", data)
    first = events(tmp_path / "run", "skipped")[0]
    assert len(first["files"]) == 2
    assert all((data / "imgs" / name).is_file() for name in first["files"])
    said = capsys.readouterr()
    assert f"({', '.join(first['files'])})" in said.out + said.err
    last = events(tmp_path / "run", "skipped")[-1]
    assert f"files of that step: {', '.join(last['files'])}" in stopped.value.fix


def test_a_failing_callback_names_no_files(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "raising_notes.py").write_text("def fn(event): raise RuntimeError")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(TrainingStopped) as stopped:
        unet(tmp_path / "run", data, **{"train.callbacks": ["raising_notes:fn"]})
    assert stopped.value.fix == f"correct the function, then continue with: halfstep train --resume {tmp_path / 'run'}"


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_run_whose_steps_were_all_skipped_says_so_and_ends_with_1(
    tmp_path: Path, precision: str, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {"train.max_steps": 2, "model.options": {"poisoned": [0, 1]}, "precision.default": precision}
    with pytest.raises(TrainingStopped, match="2 of 2, the last one: loss is nan") as stopped:
        run(tmp_path / "run", settings | {"precision.simulate": precision == "fp16", "log.quiet": False})
    printed = capsys.readouterr()
    assert "look closer" not in printed.out + printed.err
    assert stopped.value.exit_code == 1
    assert stopped.value.fix


def test_a_dry_run_names_nothing_of_a_folder_that_is_gone(
    tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [f"{key}={json.dumps(value)}" for key, value in SMALL.items()]
    with pytest.raises(SystemExit) as ended:
        main(["train", "unet", "--dry", *words, f"data.dir={data}", "train.max_steps=1"])
    assert not ended.value.code
    printed = capsys.readouterr()
    said = printed.out.partition("done")[2]
    assert "best iou" in said
    assert DRY_PREFIX not in said
    assert DRY_PREFIX not in suggest_resume(tmp_path / f"{DRY_PREFIX}ab" / "unet")
    assert suggest_resume(tmp_path / "unet").endswith(f"--resume {tmp_path / 'unet'}")


def test_a_run_that_only_went_back_to_its_start_has_trained_nothing(tmp_path: Path) -> None:
    settings = {"train.max_steps": 8, "model.options": {"poisoned": list(range(50))}, "guard.on_fault": "rollback"}
    with pytest.raises(TrainingStopped, match="nothing was trained"):
        run(tmp_path / "run", settings)


def test_an_fp16_run_that_is_too_short_to_find_its_scale_is_told_so(tmp_path: Path) -> None:
    settings = {"train.max_steps": 1, "precision.default": "fp16", "precision.simulate": True,
                "scaler.init_scale": 2.0**40}  # fmt: skip
    with pytest.raises(TrainingStopped, match="1 of 1, the last one: gradient norm is") as stopped:
        run(tmp_path / "run", settings)
    assert "lower scaler.init_scale" in stopped.value.fix


def test_a_run_with_one_step_that_holds_ends_well_and_a_resumed_part_counts_for_itself(tmp_path: Path) -> None:
    settings = {"train.max_steps": 2, "model.options": {"poisoned": [1, 2, 3]}}
    folder = run(tmp_path / "run", settings)
    with pytest.raises(TrainingStopped, match="2 of 2"):
        resume(folder, "train.max_steps=4")
    assert newest(folder).state["step"]["attempted"] == 4
