from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from halfstep_train.workloads.classification.config import ImageAugmentConfig
from halfstep_train.workloads.classification.scores import classification_loss, mix

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
