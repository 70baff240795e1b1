from __future__ import annotations

import json
from pathlib import Path

import pytest

from command_line import run_command


@pytest.fixture(scope="module")
def unet(trained_unet: Path) -> Path:
    return trained_unet


@pytest.fixture(scope="module")
def resnet(trained_resnet: Path) -> Path:
    return trained_resnet


def test_masks_are_written_and_told_of(unet: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("predict", str(unet), str(unet / "data" / "imgs"), "--out", str(tmp_path / "out"))
    code, text, progress = run_command(capsys, *arguments)
    assert code == 0
    assert "masks/000_mask.png" in text
    assert "and 60 more" in text
    assert "Predicting 100/100" in progress
    assert len(list((tmp_path / "out" / "masks").iterdir())) == 100
    code, text, error = run_command(capsys, *arguments)
    assert (code, text) == (2, "")
    assert "already exists" in error


def test_classes_come_as_table_and_json(resnet: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pictures = resnet / "data" / "val" / "rings_fine"
    code, text, _ = run_command(capsys, "predict", str(resnet), str(pictures), "--top_k", "2")
    assert code == 0
    assert str(pictures / "000.jpg") in text
    code, text, _ = run_command(capsys, "predict", str(resnet), str(pictures), "--json", "--top-k", "2")
    found = json.loads(text)["predictions"]
    assert code == 0
    assert len(found) == 20
    assert all(len(answer["top"]) == 2 for answer in found)


def test_a_bad_file_is_counted_and_gives_exit_code_1(
    resnet: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad, good = tmp_path / "bad.jpg", resnet / "data" / "val" / "rings_fine" / "000.jpg"
    bad.write_text("text")
    code, text, error = run_command(capsys, "predict", str(resnet), str(bad), str(good))
    assert code == 1
    assert "1 could not be used" in text
    assert f"left out {bad}" in error
    code, text, _ = run_command(capsys, "predict", str(resnet), str(bad), str(good), "--json")
    assert (code, [failure["file"] for failure in json.loads(text)["failed"]]) == (1, [str(bad)])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("RUN", "RUN/data", "--tile", "100"), "resnet18 has no option --tile 100"),
    ],
)
def test_mistakes_are_explained(
    resnet: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    code, text, error = run_command(capsys, "predict", *(word.replace("RUN", str(resnet)) for word in arguments))
    assert (code, text) == (2, "")
    assert message in error


def test_evaluate_prints_scores_of_every_class_and_where_the_pictures_are(
    unet: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, text, progress = run_command(capsys, "evaluate", str(unet), "--batch_size", "5")
    assert code == 0
    assert "iou 0." in text
    assert "0 (background)" in text
    assert f"{unet / 'report' / 'evaluation'}" in text
    assert "contact_sheet.png" in text
    assert "Evaluating 4/4" in progress
    assert "\x1b" not in text + progress


def test_json_is_all_that_stands_on_standard_output(
    unet: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "out")
    code, text, _ = run_command(capsys, "evaluate", str(unet), "--json", "--out", out, "--checkpoint", "last")
    found = json.loads(text)
    assert (code, found["checkpoint"], found["samples"]) == (0, "step-00000006", 20)
    assert all(Path(file).exists() for file in found["files"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("RUN", "--data", "RUN/checkpoints"), "no imgs/ and masks/"),
        (("RUN", "--checkpoint", "bset"), "did you mean 'best'"),
        (("RUN", "--precision", "fp7"), "unknown precision 'fp7'"),
        (("RUN", "--batch-size", "0"), "greater than or equal to 1"),
    ],
)
def test_mistakes_in_evaluate_are_explained(
    unet: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    code, text, error = run_command(capsys, "evaluate", *(word.replace("RUN", str(unet)) for word in arguments))
    assert (code, text) == (2, "")
    assert message in error
