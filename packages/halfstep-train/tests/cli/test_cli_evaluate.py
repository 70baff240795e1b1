from __future__ import annotations

import json
from pathlib import Path

import pytest

from command_line import run_command


@pytest.fixture(scope="module")
def unet(trained_unet: Path) -> Path:
    return trained_unet


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
def test_mistakes_are_explained(
    unet: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    code, text, error = run_command(capsys, "evaluate", *(word.replace("RUN", str(unet)) for word in arguments))
    assert (code, text) == (2, "")
    assert message in error
