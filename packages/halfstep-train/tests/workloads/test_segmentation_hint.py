"""A U-Net that paints every pixel alike is told apart from one that is merely bad."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path

import pytest
import torch
from rich.console import Console

from halfstep_train.report.results import show_evaluation
from halfstep_train.run.journal import find_hint
from halfstep_train.run.train import train
from halfstep_train.use.evaluate import evaluate
from halfstep_train.workloads import load
from halfstep_train.workloads.segmentation.demo import write_demo
from halfstep_train.workloads.segmentation.scores import SegmentationMetrics, hint_at_single_class
from tiny_runs import Told


def scores(predicted: list[int], truth: list[int], num_classes: int = 3) -> dict[str, float]:
    metrics = SegmentationMetrics(num_classes)
    logits = torch.nn.functional.one_hot(torch.tensor(predicted), num_classes).float().T.reshape(1, num_classes, 1, -1)
    metrics.update(logits, {"mask": torch.tensor(truth, dtype=torch.uint8).reshape(1, 1, -1)})
    return metrics.compute()


@pytest.mark.parametrize(
    ("predicted", "truth", "kind"),
    [
        ([0, 0, 0, 0], [0, 0, 1, 2], "class 0"),
        ([1, 1, 1, 1], [0, 0, 1, 1], "class 1"),
        ([2, 2, 2, 2], [0, 255, 2, 0], "class 2"),
        ([0, 0, 0, 1], [0, 0, 1, 0], ""),
        ([0, 0, 1, 1], [0, 0, 1, 1], ""),
        ([0, 0, 0, 0], [0, 0, 0, 0], ""),
        ([0, 0, 0, 1], [0, 0, 1, 2], ""),
        ([0] * 5000 + [1], [0] * 2000 + [1] * 3001, "class 0"),
        ([0] * 5000 + [1], [0] * 5000 + [1], ""),
    ],
)
def test_the_hint_names_the_class_that_was_predicted_everywhere(
    predicted: list[int], truth: list[int], kind: str
) -> None:
    hint = hint_at_single_class(scores(predicted, truth))
    assert hint.startswith(f"practically every pixel of every image was predicted as {kind}") if kind else hint == ""


def test_beside_a_loss_that_is_not_finite_classes_are_not_the_matter() -> None:
    collapsed = scores([0, 0, 0, 0], [0, 0, 1, 2])
    assert find_hint("unet", {"loss": 0.5, **collapsed})
    for loss in (math.nan, math.inf):
        assert find_hint("unet", {"loss": loss, **collapsed}) == ""


def test_a_collapsed_run_is_hinted_at_in_training_and_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import halfstep_train.workloads.segmentation.build as workload

    write_demo(tmp_path / "data", num_images=6, side=16)
    values = {"data.dir": str(tmp_path / "data"), "data.image_size": 16, "model.base_channels": 2, "model.depth": 1,
              "train.batch_size": 2, "train.epochs": 1, "data.num_workers": 0, "device": "cpu"}  # fmt: skip
    # Everything pulls the logits of class 1 up, whatever the masks say.
    monkeypatch.setattr(workload, "segmentation_loss", lambda logits, *_, **__: (logits[:, 0] - logits[:, 1]).sum())
    overrides = [*(f"{key}={json.dumps(value)}" for key, value in values.items()), "optimizer.lr=1", "optimizer=sgd"]
    folder = train(load("unet", overrides=overrides), out=tmp_path / "run")
    assert "hint: practically every pixel of every image was predicted as class 1" in capsys.readouterr().out
    found = evaluate(folder, report=Told(folder).report)
    screen = io.StringIO()
    show_evaluation(found, Console(file=screen, width=500))
    assert "hint: practically every pixel of every image was predicted as class 1" in screen.getvalue()
