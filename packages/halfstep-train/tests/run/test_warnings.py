"""Warnings reach standard error, also with --quiet: files left out, a precision that was not switched on."""

from __future__ import annotations

from pathlib import Path

import pytest

from halfstep_train.run.train import train
from halfstep_train.workloads import load
from halfstep_train.workloads.segmentation.demo import write_demo

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
