from __future__ import annotations

import io
import json
import math
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import Tensor
from torch.nn import functional as F

from halfstep_train.report.run_report import show_evaluation
from halfstep_train.run.journal import find_hint
from halfstep_train.run.train import train
from halfstep_train.use.evaluate import evaluate
from halfstep_train.workloads import load
from halfstep_train.workloads.segmentation.data import IGNORED
from halfstep_train.workloads.segmentation.demo import write_demo
from halfstep_train.workloads.segmentation.scores import SegmentationMetrics, hint_at_single_class, segmentation_loss
from tiny_runs import Told


def case(num_classes: int, *, size: int = 6, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(3, num_classes, size, size, generator=generator)
    mask = torch.randint(0, max(2, num_classes), (3, size, size), generator=generator).byte()
    return logits, mask


def reference_dice(probability: Tensor, truth: Tensor) -> Tensor:
    """The reference project's formula for one class."""
    overlap = 2 * (probability * truth).sum()
    sizes = probability.sum() + truth.sum()
    return (overlap + 1e-6) / (torch.where(sizes == 0, overlap, sizes) + 1e-6)


def test_binary_loss_is_the_reference_projects() -> None:
    logits, mask = case(1)
    target = mask.double()
    x = logits[:, 0].double()
    expected = F.binary_cross_entropy_with_logits(x, target) + 1 - reference_dice(x.sigmoid(), target)
    torch.testing.assert_close(segmentation_loss(logits, mask).double(), expected)


def test_multiclass_loss_is_torchs_weighted_cross_entropy_and_the_mean_dice() -> None:
    logits, mask = case(4)
    weights = (0.2, 1.0, 2.0, 3.0)
    p = logits.double().softmax(1)
    dice = torch.stack([reference_dice(p[:, k], (mask == k).double()) for k in range(4)]).mean()
    expected = F.cross_entropy(logits.double(), mask.long(), weight=torch.tensor(weights).double()) + 1 - dice
    torch.testing.assert_close(segmentation_loss(logits, mask, class_weights=weights).double(), expected)


def test_binary_class_weights_weigh_background_and_foreground() -> None:
    logits, mask = case(1)
    two = torch.cat([torch.zeros_like(logits), logits], dim=1)
    weights = (1.0, 5.0)
    expected = F.cross_entropy(two, mask.long(), weight=torch.tensor(weights))
    torch.testing.assert_close(segmentation_loss(logits, mask, class_weights=weights, dice_weight=0), expected)


@pytest.mark.parametrize("num_classes", [1, 2, 3])
def test_ignored_pixels_have_neither_value_nor_gradient(num_classes: int) -> None:
    logits, mask = case(num_classes)
    mask[:, :, 4:] = IGNORED
    logits.requires_grad_()
    loss = segmentation_loss(logits, mask)
    loss.backward()
    torch.testing.assert_close(loss, segmentation_loss(logits[..., :4], mask[..., :4]))
    assert logits.grad is not None
    assert (logits.grad[..., 4:] == 0).all()
    assert (logits.grad[..., :4] != 0).all()


@pytest.mark.parametrize("num_classes", [1, 3])
def test_a_batch_that_is_all_ignored_gives_zero_and_zero_gradients(num_classes: int) -> None:
    logits, mask = case(num_classes)
    logits.requires_grad_()
    loss = segmentation_loss(logits, torch.full_like(mask, IGNORED))
    loss.backward()
    assert loss == 0
    assert logits.grad is not None
    assert (logits.grad == 0).all()


@pytest.mark.parametrize("num_classes", [1, 3])
def test_gradients_are_right(num_classes: int) -> None:
    logits, mask = case(num_classes, size=2)
    mask[0, 0, 0] = IGNORED
    logits = logits.double().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: segmentation_loss(x, mask), logits)


@pytest.mark.parametrize("num_classes", [1, 2])
def test_half_precision_logits_give_the_fp32_loss_where_fp16_sums_would_overflow(num_classes: int) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, num_classes, 256, 256, generator=generator)
    mask = torch.ones(2, 256, 256, dtype=torch.uint8)  # 131072 pixels of one class: past fp16's 65504
    for dtype in (torch.float16, torch.bfloat16):
        half = logits.to(dtype).requires_grad_()
        with torch.autocast("cpu", dtype=dtype):
            loss = segmentation_loss(half, mask)
        assert loss.dtype == torch.float32
        torch.testing.assert_close(loss, segmentation_loss(half.detach().float(), mask))
        loss.backward()
        assert half.grad is not None
        assert half.grad.dtype == dtype


@pytest.mark.parametrize("num_classes", [1, 3])
def test_the_loss_compiles_into_one_graph(num_classes: int) -> None:
    logits, mask = case(num_classes)
    compiled = torch.compile(segmentation_loss, backend="aot_eager", fullgraph=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(compiled(logits, mask), segmentation_loss(logits, mask))


def test_extreme_logits_stay_finite() -> None:
    logits = torch.tensor([60000.0, -60000.0]).view(1, 2, 1, 1).expand(1, 2, 4, 4).clone().requires_grad_()
    loss = segmentation_loss(logits, torch.ones(1, 4, 4, dtype=torch.uint8))
    loss.backward()
    assert loss.isfinite()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()


def scores(num_classes: int, batches: list[tuple[Tensor, Tensor]]) -> dict[str, float]:
    metrics = SegmentationMetrics(num_classes)
    for logits, mask in batches:
        metrics.update(logits, {"mask": mask})
    return metrics.compute()


def test_metrics_count_over_the_whole_set_not_over_batches() -> None:
    truth = torch.tensor([[[1, 1, 1, 0]], [[0, 0, 0, 1]]]).byte()
    guess = torch.tensor([[[1, 1, 0, 0]], [[0, 1, 0, 1]]])
    logits = F.one_hot(guess, 2).permute(0, 3, 1, 2).float()
    together = scores(2, [(logits, truth)])
    apart = scores(2, [(logits[:1], truth[:1]), (logits[1:], truth[1:])])
    assert together == apart
    assert together["iou"] == together["iou/1"] == pytest.approx(3 / 5)
    assert together["dice/1"] == pytest.approx(6 / 8)
    assert together["iou/0"] == pytest.approx(3 / 5)
    assert together["accuracy"] == pytest.approx(6 / 8)


def test_one_logit_scores_like_two() -> None:
    logits, mask = case(1)
    assert scores(1, [(logits, mask)]) == scores(2, [(torch.cat([torch.zeros_like(logits), logits], 1), mask)])


def test_ignored_pixels_do_not_count_in_the_metrics() -> None:
    logits, mask = case(3)
    mask[:, :, 4:] = IGNORED
    assert scores(3, [(logits, mask)]) == scores(3, [(logits[..., :4], mask[..., :4])])


def test_the_mean_leaves_out_background_and_classes_that_never_occur() -> None:
    logits = torch.zeros(1, 4, 2, 2)
    logits[:, 1] = 1
    result = scores(4, [(logits, torch.tensor([[[1, 1], [2, 1]]]).byte())])
    assert result["iou"] == pytest.approx((3 / 4 + 0) / 2)
    of_classes = {f"{name}/{k}" for name in ("iou", "dice", "predicted") for k in (1, 2)}
    assert set(result) == {"iou", "dice", "accuracy", "iou_all", "dice_all", *of_classes}
    assert (result["predicted/1"], result["predicted/2"]) == (1, 0)


def test_empty_masks_found_empty_score_one_and_false_alarms_zero() -> None:
    empty = torch.zeros(2, 4, 4, dtype=torch.uint8)
    assert scores(1, [(torch.full((2, 1, 4, 4), -1.0), empty)])["iou"] == 1
    assert scores(1, [(torch.full((2, 1, 4, 4), 1.0), empty)])["iou"] == 0
    assert scores(1, []) == {}


def test_both_means_are_reported_and_the_background_decides_the_first() -> None:
    """Class 0 has IoU 1/2, class 1 has 0, class 2 has 1."""
    logits = torch.nn.functional.one_hot(torch.tensor([0, 0, 2]), 3).float().T.reshape(1, 3, 1, 3)
    truth = {"mask": torch.tensor([[[0, 1, 2]]], dtype=torch.uint8)}
    scores = {}
    for background in (0, 2, None):
        metrics = SegmentationMetrics(3, background)
        metrics.update(logits, truth)
        scores[background] = metrics.compute()
    assert [scores[background]["iou"] for background in (0, 2, None)] == [1 / 2, 1 / 4, 1 / 2]
    assert {found["iou_all"] for found in scores.values()} == {1 / 2}
    assert scores[None]["dice"] == scores[0]["dice_all"] == pytest.approx((2 / 3 + 0 + 1) / 3)


# --- hint for a U-Net that predicts one class for every pixel ---


def hint_scores(predicted: list[int], truth: list[int], num_classes: int = 3) -> dict[str, float]:
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
    hint = hint_at_single_class(hint_scores(predicted, truth))
    assert hint.startswith(f"practically every pixel of every image was predicted as {kind}") if kind else hint == ""


def test_beside_a_loss_that_is_not_finite_classes_are_not_the_matter() -> None:
    collapsed = hint_scores([0, 0, 0, 0], [0, 0, 1, 2])
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
