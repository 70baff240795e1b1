"""File and class names that no UTF-8 text holds, or that trip up tables, pictures and shells."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from halfstep_train.cli.main import main

ODD = os.fsdecode(b"caf\xe9")
SHOWN = r"caf\xe9"
CLASSES = [ODD, "new\nline", "qu\"o'te", "$x^{", "tab\tand 😀"]
TINY = ["train.max_steps=1", "train.fast=off", "data.num_workers=0", "--precision=fp32", "--device=cpu"]
RESNET = [*TINY, "model.width=2", "model.blocks=[1]", "data.image_size=16", "--batch-size=5"]
UNET = [*TINY, "model.base_channels=1", "model.depth=1", "--batch-size=2"]


def save(path: Path, pixels: np.ndarray) -> None:  # type: ignore[type-arg]
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels.astype(np.uint8)).save(path)


def run(capsys: pytest.CaptureFixture[str], *argv: str, code: int = 0) -> str:
    """What is printed; the captured streams take UTF-8 alone."""
    try:
        main(argv)
        ended = 0
    except SystemExit as stop:
        ended = int(stop.code or 0)
    printed = capsys.readouterr()
    assert ended == code, printed.err
    return printed.out if code == 0 else printed.err


@pytest.fixture
def classes(tmp_path: Path) -> Path:
    generator = np.random.default_rng(0)
    for part in ("train", "val"):
        for name in CLASSES:
            for number in range(2):
                save(tmp_path / "set" / part / name / f"{ODD} {number}.png", generator.integers(0, 256, (16, 16, 3)))
    return tmp_path / "set"


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    generator = np.random.default_rng(0)
    for name in (ODD, "new\nline", "qu\"o'te", "$x^{"):
        save(tmp_path / "pairs" / "imgs" / f"{name}.png", generator.integers(0, 256, (16, 16, 3)))
        save(tmp_path / "pairs" / "masks" / f"{name}_mask.png", generator.integers(0, 2, (16, 16)) * 255)
    return tmp_path / "pairs"


@pytest.mark.filterwarnings("ignore:Glyph .* missing from font")
def test_classes_and_files_of_any_name_are_trained_evaluated_and_predicted(
    classes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    run(capsys, "train", "resnet18", "--data-dir", str(classes), *RESNET, "data.cache=true", "--out", str(out))
    evaluated = json.loads(run(capsys, "evaluate", str(out), "--json"))
    assert {row["class"] for row in evaluated["classes"]} == {SHOWN, *CLASSES[1:]}
    predicted = json.loads(run(capsys, "predict", str(out), str(classes / "val"), "--json"))
    files = {answer["file"] for answer in predicted["predictions"]}
    assert f"{classes}/val/{SHOWN}/{SHOWN} 0.png" in files
    run(capsys, "train", "--resume", str(out), "train.max_steps=2")


def test_pairs_of_any_name_are_trained_evaluated_and_predicted(
    pairs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    run(capsys, "train", "unet", "--data-dir", str(pairs), *UNET, "data.val_fraction=0.5", "--out", str(out))
    run(capsys, "evaluate", str(out))
    text = run(capsys, "predict", str(out), str(pairs / "imgs"), "--out", str(tmp_path / "masks"))
    assert "4 files" in text
    assert (tmp_path / "masks" / "masks" / f"{ODD}_mask.png").is_file()


def test_an_error_about_a_file_of_any_name_can_be_printed(pairs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (pairs / "imgs" / f"{ODD}.png").write_bytes(b"no picture")
    assert rf"imgs/{SHOWN}.png" in run(capsys, "train", "unet", "--data-dir", str(pairs), *UNET, code=2)


def test_a_data_folder_that_cannot_be_stored_is_refused(
    pairs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    odd = tmp_path / ODD
    pairs.rename(odd)
    assert "UTF-8" in run(capsys, "train", "unet", "--data-dir", str(odd), *UNET, code=2)
