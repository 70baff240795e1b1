from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from halfstep_train.workloads.classification.config import ImageAugmentConfig
from halfstep_train.workloads.classification.scores import (
    ClassificationMetrics,
    classification_loss,
    compute_ranks,
    mix,
)
from halfstep_train.workloads.segmentation.scores import segmentation_loss

BOTH = ImageAugmentConfig(mixup=0.2, cutmix=1.0)


def batch_of(num: int = 6, size: int = 8) -> dict[str, Tensor]:
    image = torch.randn(num, 3, size, size, generator=torch.Generator().manual_seed(0))
    return {"image": image, "label": torch.arange(num), "index": torch.arange(num)}


def mixed_by(spec: ImageAugmentConfig, *, num: int = 40) -> list[dict[str, Tensor]]:
    return [mix(batch_of(), spec, key=(0, step)) for step in range(num)]


def is_cut(batch: dict[str, Tensor]) -> bool:
    own, image = batch_of()["image"], batch["image"]
    return bool(((image == own) | (image == own.roll(1, 0))).all())


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_of_a_plain_batch_is_torchs_cross_entropy(smoothing: float) -> None:
    logits, batch = torch.randn(6, 7), batch_of()
    expected = F.cross_entropy(logits, batch["label"], label_smoothing=smoothing)
    assert torch.equal(classification_loss(logits, batch, smoothing=smoothing), expected)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_of_a_mixed_batch_is_the_two_labels_losses_by_share(smoothing: float) -> None:
    logits, batch = torch.randn(6, 7), mix(batch_of(), ImageAugmentConfig(mixup=1.0), key=(0, 1))
    lam = batch["lam"][0].item()
    expected = lam * F.cross_entropy(logits, batch["label"], label_smoothing=smoothing)
    expected = expected + (1 - lam) * F.cross_entropy(logits, batch["label_b"], label_smoothing=smoothing)
    torch.testing.assert_close(classification_loss(logits, batch, smoothing=smoothing), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_logits_are_summed_in_fp32_under_autocast(dtype: torch.dtype) -> None:
    logits = (torch.randn(4, 5) * 20).to(dtype)
    batch = {"label": torch.tensor([0, 1, 2, 3])}
    with torch.autocast("cpu", dtype=dtype):
        loss = classification_loss(logits, batch, smoothing=0.1)
    assert loss.dtype == torch.float32
    reference = F.cross_entropy(logits.double(), batch["label"], label_smoothing=0.1)
    # fp32 has 24 bits; the sum of five terms keeps all but a few.
    torch.testing.assert_close(loss.double(), reference, rtol=1e-6, atol=0)


def test_one_compiled_graph_serves_the_shares_of_every_batch() -> None:
    logits = torch.randn(6, 7)
    compiled = torch.compile(classification_loss, backend="eager", fullgraph=True)
    compiled(logits, mix(batch_of(), BOTH, key=(0, 0)), smoothing=0.1)
    with torch.compiler.set_stance("fail_on_recompile"):
        for step in range(1, 5):
            batch = mix(batch_of(), BOTH, key=(0, step))
            expected = classification_loss(logits, batch, smoothing=0.1)
            torch.testing.assert_close(compiled(logits, batch, smoothing=0.1), expected)


def test_mixing_is_a_pure_function_of_its_key_and_leaves_its_input_alone() -> None:
    batch = batch_of()
    before = batch["image"].clone()
    first, again, other = (mix(batch, BOTH, key=key) for key in ((0, 3), (0, 3), (0, 4)))
    assert torch.equal(first["image"], again["image"])
    assert torch.equal(first["lam"], again["lam"])
    assert not torch.equal(first["lam"], other["lam"])
    assert torch.equal(batch["image"], before)


def test_mixup_blends_each_image_with_its_neighbour() -> None:
    batch = mix(batch_of(), ImageAugmentConfig(mixup=1.0), key=(0, 1))
    own, lam = batch_of()["image"], batch["lam"][0]
    torch.testing.assert_close(batch["image"], lam * own + (1 - lam) * own.roll(1, 0))
    assert torch.equal(batch["label_b"], batch["label"].roll(1))
    assert batch["lam"].dtype == torch.float32


def test_cutmix_shows_only_pixels_of_the_original_images_and_its_share_is_their_area() -> None:
    own = batch_of()["image"]
    for batch in mixed_by(ImageAugmentConfig(cutmix=1.0)):
        assert is_cut(batch)
        # Normal numbers do not repeat, so a pixel that equals the own image's is the own image's.
        share = (batch["image"] == own).float().mean()
        torch.testing.assert_close(share, batch["lam"][0])


def test_both_on_means_one_of_them_by_the_given_share() -> None:
    cuts = sum(is_cut(batch) for batch in mixed_by(ImageAugmentConfig(mixup=1.0, cutmix=1.0), num=200))
    # Binomial(200, 0.5): five deviations are 35.
    assert 65 < cuts < 135


def test_a_batch_that_is_not_mixed_has_the_same_form_as_one_that_is() -> None:
    plain, mixed = (mix(batch_of(), ImageAugmentConfig(mixup=alpha), key=(0, 0)) for alpha in (0.0, 1.0))
    assert {n: (t.shape, t.dtype) for n, t in plain.items()} == {n: (t.shape, t.dtype) for n, t in mixed.items()}
    assert torch.equal(plain["image"], batch_of()["image"])
    assert torch.equal(plain["lam"], torch.ones(6))


def test_mixing_keeps_the_channels_last_layout() -> None:
    batch = batch_of()
    batch["image"] = batch["image"].to(memory_format=torch.channels_last)
    for spec in (ImageAugmentConfig(mixup=1.0), ImageAugmentConfig(cutmix=1.0)):
        assert mix(batch, spec, key=(0, 1))["image"].is_contiguous(memory_format=torch.channels_last)


def counted(logits: Tensor, labels: Tensor, sizes: list[int], num_classes: int) -> ClassificationMetrics:
    metrics = ClassificationMetrics(num_classes, confusion=True)
    for part, label in zip(logits.split(sizes), labels.split(sizes), strict=True):
        metrics.update(part, {"label": label})
    return metrics


def test_top1_and_top5_are_exact_whatever_the_batches() -> None:
    generator = torch.Generator().manual_seed(0)
    logits, labels = torch.randn(37, 10, generator=generator), torch.randint(10, (37,), generator=generator)
    top = logits.topk(5, dim=1).indices == labels.unsqueeze(1)
    expected = {"top1": int(top[:, 0].sum()) / 37, "top5": int(top.any(dim=1).sum()) / 37}
    for sizes in ([37], [16, 16, 5], [1] * 37):
        assert counted(logits, labels, sizes, 10).compute() == expected


def test_equal_logits_are_not_all_hits() -> None:
    assert compute_ranks(torch.zeros(4, 6), torch.tensor([0, 1, 2, 5])).tolist() == [0, 1, 2, 5]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_not_numbers_are_never_a_hit_for_another_class(bad: float) -> None:
    logits = torch.zeros(2, 6)
    logits[:, 5] = bad
    assert compute_ranks(logits, torch.tensor([0, 1])).min() >= 1


def test_the_confusion_matrix_and_the_classes_add_up() -> None:
    logits = torch.eye(3)[torch.tensor([0, 1, 1, 2, 0])]
    metrics = counted(logits, torch.tensor([0, 1, 2, 2, 2]), [2, 3], 3)
    assert metrics.get_confusion().tolist() == [[1, 0, 0], [0, 1, 0], [1, 1, 1]]
    assert metrics.count_by_class() == [(1, 1), (1, 1), (3, 1)]


def test_nothing_counted_is_no_score() -> None:
    assert ClassificationMetrics(3).compute() == {}


def test_counts_go_on_from_a_stored_state() -> None:
    first, second = ClassificationMetrics(3), ClassificationMetrics(3)
    first.update(torch.eye(3), {"label": torch.tensor([0, 1, 0])})
    second.load_state_dict(first.state_dict())
    second.update(torch.eye(3), {"label": torch.tensor([0, 1, 2])})
    assert second.compute() == {"top1": 5 / 6}
    assert first.compute() == {"top1": 2 / 3}


# --- a compiled loss keeps no fp32 tensor as large as the logits ---

PARTITIONED = "aot_eager_decomp_partition"
"""inductor's own choice of what is kept and what is computed again, without a C++ compiler."""

MASK = torch.arange(4 * 16 * 16).view(4, 16, 16) % 2
LABEL = {"label": torch.arange(32) % 10}
MIXED = {**LABEL, "label_b": LABEL["label"].roll(1), "lam": torch.full((32,), 0.3)}


def large_kept(loss: Callable[[Tensor], Tensor], logits: Tensor) -> list[torch.dtype]:
    """The formats of what is kept for backward and has as many values as the logits; booleans aside."""
    found: dict[int, Tensor] = {}

    def seen(tensor: Tensor) -> Tensor:
        found[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(seen, lambda tensor: tensor):
        loss(logits.clone().requires_grad_())
    return [t.dtype for t in found.values() if t.numel() >= logits.numel() and t.dtype.is_floating_point]


@pytest.mark.parametrize(
    ("loss", "shape", "num_eager"),
    [
        (lambda logits: segmentation_loss(logits, MASK), (4, 2, 16, 16), 3),
        (lambda logits: classification_loss(logits, LABEL), (32, 10), 1),
        (lambda logits: classification_loss(logits, MIXED, smoothing=0.1), (32, 10), 2),
    ],
)
def test_a_compiled_loss_keeps_the_logits_in_their_own_format_only(
    loss: Callable[[Tensor], Tensor], shape: tuple[int, ...], num_eager: int
) -> None:
    logits = torch.linspace(-3, 3, torch.Size(shape).numel()).view(shape).bfloat16()
    assert large_kept(loss, logits) == [torch.float32] * num_eager  # eager has nobody to fuse it
    torch.compiler.reset()
    compiled = torch.compile(loss, backend=PARTITIONED, dynamic=False)
    compiled(logits.clone().requires_grad_()).backward()
    assert large_kept(compiled, logits) == [torch.bfloat16]
