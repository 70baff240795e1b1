from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from halfstep.prefetching import prefetch
from halfstep_train.workloads.segmentation.build import augment
from halfstep_train.workloads.segmentation.config import UNetAugmentConfig
from halfstep_train.workloads.segmentation.evaluate import predict_image
from halfstep_train.workloads.segmentation.scores import SegmentationMetrics, segmentation_loss
from halfstep_train.workloads.segmentation.unet import UNet
from no_waiting import no_host_wait

pytestmark = pytest.mark.gpu

EVERYTHING = UNetAugmentConfig(flip=0.5, rotate_degrees=30, scale=0.2, crop=0.3, brightness=0.2)


def batches(count: int) -> Iterator[dict[str, Tensor]]:
    for i in range(count):
        yield {"image": torch.full((4, 3, 64, 64), i, dtype=torch.uint8), "mask": torch.ones(4, 64, 64).byte()}


def test_prefetched_batches_arrive_whole_and_in_order_beside_a_busy_device() -> None:
    busy = torch.rand(4096, 4096, device="cuda")
    sums = []
    for batch in prefetch(batches(20), "cuda", depth=3):
        busy = busy @ busy / 4096
        sums.append(batch["image"].sum())
    assert [int(total) for total in sums] == [i * 4 * 3 * 64 * 64 for i in range(20)]


def test_feeding_augmenting_losing_and_counting_never_wait_for_the_device() -> None:
    metrics = SegmentationMetrics(2)
    weight = torch.rand(2, 3, 1, 1, device="cuda", requires_grad=True)
    with no_host_wait():
        for step, batch in enumerate(prefetch(batches(5), "cuda")):
            image, mask = augment(batch["image"].float() / 255, batch["mask"], EVERYTHING, key=(0, step))
            with torch.autocast("cuda", dtype=torch.float16):
                logits = torch.nn.functional.conv2d(image, weight)
                loss = segmentation_loss(logits, mask, class_weights=(1.0, 2.0))
            loss.backward()
            metrics.update(logits, {"mask": mask})
    assert 0 <= metrics.compute()["accuracy"] <= 1


def test_the_device_augments_as_the_cpu_does() -> None:
    image = torch.rand(4, 3, 48, 64)
    mask = (image[:, 0] > 0.5).byte()
    here = augment(image, mask, EVERYTHING, key=(1, 2))
    there = augment(image.cuda(), mask.cuda(), EVERYTHING, key=(1, 2))
    torch.testing.assert_close(here[0], there[0].cpu(), atol=1e-3, rtol=0)
    assert (here[1] == there[1].cpu()).float().mean() > 0.99


@pytest.mark.parametrize("num_classes", [1, 2])
def test_the_loss_is_deterministic_where_torch_is_asked_to_be(num_classes: int) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        logits = torch.randn(2, num_classes, 64, 64, device="cuda", requires_grad=True)
        mask = torch.randint(0, 2, (2, 64, 64), device="cuda").byte()
        gradients = [torch.autograd.grad(segmentation_loss(logits, mask), logits)[0] for _ in range(3)]
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(gradient, gradients[0]) for gradient in gradients)


def test_tiles_agree_with_the_whole_image_on_the_device() -> None:
    torch.manual_seed(0)
    model = UNet(base_channels=8).cuda().eval()
    image = torch.rand(3, 900, 700, device="cuda")
    whole = predict_image(model, image, depth=4, tile=2000)
    tiled = predict_image(model, image, depth=4, tile=512)
    assert (whole == tiled).float().mean() > 0.999
