"""Room on the disk is looked at before a run starts or goes on; the estimate is close to what is written."""

from __future__ import annotations

import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest

from halfstep.errors import CheckpointError
from halfstep_train.config.schema import OptimizerConfig
from halfstep_train.run.assemble import Assembly
from halfstep_train.run.checkpoint import Checkpoints
from halfstep_train.run.folder import RunFolder
from halfstep_train.run.stored_state import REPORT_BYTES, check_disk, estimate_checkpoint_bytes, sum_folder_bytes
from halfstep_train.workloads import load
from halfstep_train.workloads.segmentation.demo import write_demo
from tiny_runs import unet_run
from whole_runs import assemble_run, config_of, run

Usage = namedtuple("Usage", "total used free")


def assembled(more: dict[str, Any]) -> Assembly:
    return assemble_run(config_of({"device": "cpu", "data.num_workers": 0, **more}))


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Any:
    def leave(num_bytes: int) -> None:
        monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(num_bytes, 0, num_bytes))

    return leave


@pytest.mark.parametrize(
    "more",
    [
        {"optimizer.name": "adamw", "ema.enabled": False},
        {"optimizer.name": "sgd", "optimizer.momentum": 0.9},
        {"guard.on_fault": "rollback", "guard.snapshot_every": 1, "guard.margin": 1, "train.max_steps": 6},
    ],
)
def test_a_checkpoint_is_about_as_large_as_was_said(more: dict[str, Any], tmp_path: Path) -> None:
    """A model of 2 MB, so that headers and generators are a few percent."""
    write_demo(tmp_path / "data", num_images=8, side=16)
    small = {"data.dir": str(tmp_path / "data"), "data.image_size": 16, "train.batch_size": 1, "data.num_workers": 0}
    large = {"model.base_channels": 16, "model.depth": 3, "train.max_steps": 1}
    done = unet_run(tmp_path / "run", {**small, **large, **more})
    config = load(str(done / "config.yaml")).config
    expected = estimate_checkpoint_bytes(assemble_run(config), config.optimizer)
    written = sum_folder_bytes(Checkpoints(done / "checkpoints").list_all()[-1])
    assert expected == pytest.approx(written, rel=0.05)


def test_a_disk_too_full_for_two_checkpoints_is_refused_with_the_numbers(tmp_path: Path, free: Any) -> None:
    free(100_000)
    with pytest.raises(CheckpointError, match=r"100 kB of free space, and this run needs 8 MB") as caught:
        run(tmp_path / "run", {})
    assert "--out" in caught.value.fix
    assert list(tmp_path.iterdir()) == []


def test_a_disk_too_full_for_all_checkpoints_is_told_with_a_limit_that_fits(tmp_path: Path, free: Any) -> None:
    parts = assembled({"train.checkpoints_total_limit": 0, "train.epochs": 100})
    size = estimate_checkpoint_bytes(parts, OptimizerConfig())
    free(20 * size + REPORT_BYTES)
    (note,) = check_disk(parts, RunFolder(tmp_path / "run"), OptimizerConfig())
    assert "100 checkpoints" in note
    assert "train.checkpoints_total_limit=18" in note
    limited = assembled({"train.checkpoints_total_limit": 18, "train.epochs": 100})
    assert check_disk(limited, RunFolder(tmp_path / "run"), OptimizerConfig()) == []


def test_a_run_that_goes_on_counts_what_it_has_written(tmp_path: Path, free: Any) -> None:
    done = run(tmp_path / "run", {"train.epochs": 3})
    parts = assembled({"train.epochs": 3})
    size = sum_folder_bytes(Checkpoints(done / "checkpoints").list_all()[-1])
    free(size + REPORT_BYTES + 1)
    assert check_disk(parts, RunFolder(done), OptimizerConfig()) == []
    free(size)
    with pytest.raises(CheckpointError, match="of free space"):
        check_disk(parts, RunFolder(done), OptimizerConfig())
