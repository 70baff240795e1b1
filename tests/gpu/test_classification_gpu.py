"""Classification on a real GPU: no host wait from bytes to counts, one compilation for all shares, fused attention."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from halfstep_train.models.vit import build_vit
from halfstep_train.workloads import load
from halfstep_train.workloads.classification.build import PrepareImages
from halfstep_train.workloads.classification.config import ImageAugmentConfig
from halfstep_train.workloads.classification.resnet import build_resnet
from halfstep_train.workloads.classification.scores import ClassificationMetrics, classification_loss, mix
from no_waiting import no_host_wait

pytestmark = pytest.mark.gpu

BOTH = ImageAugmentConfig(mixup=0.2, cutmix=1.0)


def bytes_on_gpu(num: int = 8, side: int = 96) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (num, side, side, 3), generator=generator, dtype=torch.uint8)
    box = torch.tensor([[4.0, 8.0, 70.0, 90.0]]).repeat(num, 1)
    return {name: t.cuda() for name, t in {"image": pixels, "box": box, "label": torch.arange(num) % 10}.items()}


def prepared_by(*words: str) -> PrepareImages:
    config = load("resnet50", overrides=["data.image_size=64", *words]).config
    return PrepareImages(config.data)  # type: ignore[arg-type]


def test_nothing_waits_from_bytes_to_counts() -> None:
    prepare = prepared_by("data.augment.mixup=0.2", "data.augment.cutmix=1", "data.augment.erase=0.25")
    model = build_resnet("resnet18", width=8, num_classes=10).cuda().to(memory_format=torch.channels_last)
    batch, metrics = bytes_on_gpu(), ClassificationMetrics(10, confusion=True)
    for step in range(2):  # the first meets the libraries' own set-up
        with no_host_wait() if step else torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
            for k in range(8):
                seen = prepare(batch, key=(0, step, k), training=True)
                logits = model(seen["image"])
                classification_loss(logits, seen, smoothing=0.1)
                metrics.update(logits, seen)
    fresh = ClassificationMetrics(10)
    with no_host_wait():
        fresh.update(logits, seen)
    assert sum(seen for seen, _ in metrics.count_by_class()) == 2 * 8 * 8


def test_the_gpu_mixes_as_the_cpu_does() -> None:
    image = torch.randn(6, 3, 16, 16)
    batch = {"image": image, "label": torch.arange(6)}
    for step in range(6):
        here = mix(batch, BOTH, key=(0, step))
        there = mix({name: t.cuda() for name, t in batch.items()}, BOTH, key=(0, step))
        for name in here:
            torch.testing.assert_close(there[name].cpu(), here[name])


def test_one_compilation_serves_every_share_and_agrees_with_eager() -> None:
    torch.manual_seed(0)
    model = build_resnet("resnet50", blocks=(1, 1, 1, 1), width=16, num_classes=10).cuda()
    model = model.to(memory_format=torch.channels_last)

    def region(batch: dict[str, Tensor]) -> Tensor:
        return classification_loss(model(batch["image"]), batch, smoothing=0.1)

    compiled = torch.compile(region, fullgraph=True)
    prepare = prepared_by("data.augment.mixup=0.2", "data.augment.cutmix=1")
    with torch.autocast("cuda", torch.bfloat16):
        compiled(prepare(bytes_on_gpu(), key=(0, 0), training=True)).backward()
        with torch.compiler.set_stance("fail_on_recompile"):
            for step in range(1, 6):
                batch = prepare(bytes_on_gpu(), key=(0, step), training=True)
                loss = compiled(batch)
                loss.backward()
                # bf16 has 8 bits; fusion rounds fewer times than eager does.
                torch.testing.assert_close(loss, region(batch), rtol=2e-2, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_attention_runs_on_the_flash_kernel_in_half_precision(dtype: torch.dtype) -> None:
    model = build_vit("vit_s_16", num_classes=10, image_size=64).cuda()
    with torch.autocast("cuda", dtype), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        model(torch.randn(2, 3, 64, 64, device="cuda")).sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
