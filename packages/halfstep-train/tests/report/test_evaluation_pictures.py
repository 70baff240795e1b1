"""Pictures and tables of evaluations with every kind of class names and sizes."""

from __future__ import annotations

import io
import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

from halfstep.errors import CheckpointError
from halfstep_train.report.run_report import EvaluationResult, show_evaluation
from halfstep_train.workloads.classification.evaluate import draw_confusion


@pytest.mark.parametrize("names", [["a", "b"], ["$x$ and $y", "日本語"], [f"class number {k}" for k in range(70)]])
def test_a_confusion_matrix_is_drawn_for_any_names(tmp_path: Path, names: list[str]) -> None:
    draw_confusion(np.eye(len(names), dtype=int).tolist(), names, tmp_path / "confusion.png")
    with Image.open(tmp_path / "confusion.png") as picture:
        assert min(picture.size) > 400


def test_a_picture_that_cannot_be_written_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"gone.*confusion\.png"):
        draw_confusion([[1]], ["a"], tmp_path / "gone" / "confusion.png")


def test_of_many_classes_the_worst_are_shown_and_all_are_in_the_json() -> None:
    rows = tuple({"class": f"c{k}", "accuracy": k / 100 if k else None} for k in range(100))
    found = EvaluationResult(
        run="r",
        workload="resnet18",
        checkpoint="step-1",
        weights="as trained",
        data="d",
        samples=9,
        precision="fp32",
        simulated=False,
        device="cpu",
        metrics={"loss": math.nan, "top1": 0.5},
        classes=rows,
        ranking="accuracy",
    )
    file = io.StringIO()
    show_evaluation(found, Console(file=file, width=200))
    assert "The 40 worst of 100 classes by accuracy" in file.getvalue()
    assert "c1 " in file.getvalue()
    assert "c99" not in file.getvalue()
    document = json.loads(found.to_json())
    assert (len(document["classes"]), document["metrics"]) == (100, {"loss": None, "top1": 0.5})


def test_drawing_does_not_import_pyplot(tmp_path: Path) -> None:
    script = f"""
import sys
from pathlib import Path
from halfstep_train.report.picture_file import make_figure, save_figure
save_figure(make_figure((2, 2)), Path({str(tmp_path / "figure.png")!r}))
sys.exit("matplotlib.pyplot" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0
