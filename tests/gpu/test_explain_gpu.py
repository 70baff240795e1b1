"""The profile of a small U-Net's real kernels: nearly all of them are known."""

from __future__ import annotations

import pytest
import torch

from halfstep.hardware.clock import Stopwatch
from halfstep_train.bench.step_profile import KINDS, ProfiledSteps, StepProfile, wake_profiler
from halfstep_train.workloads.segmentation.unet import UNet

pytestmark = pytest.mark.gpu

FUSED, COPIES, ATTENTION, OPTIMIZER, CONV, NORM, MATMUL, SMALL = KINDS
STEPS = 5


@pytest.fixture(scope="module")
def measured() -> tuple[float, StepProfile]:
    """The time of a step and its profile in a common loop: autocast, contiguous layout, foreach AdamW, pinned data."""
    wake_profiler(torch.device("cuda"))
    torch.manual_seed(0)
    model = UNet(base_channels=32).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    images = torch.randint(256, (8, 3, 256, 256), dtype=torch.uint8).pin_memory()
    masks = torch.randint(2, (8, 256, 256)).pin_memory()

    def train_step() -> None:
        pixels, targets = images.cuda(non_blocking=True).float() / 255, masks.cuda(non_blocking=True)
        with torch.autocast("cuda", torch.bfloat16):
            loss = torch.nn.functional.cross_entropy(model(pixels), targets)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    for _ in range(10):
        train_step()
    torch.cuda.synchronize()
    watch = Stopwatch()
    for _ in range(STEPS):
        train_step()
    torch.cuda.synchronize()
    step_ms = watch.elapsed_s * 1e3 / STEPS
    profiled = ProfiledSteps(torch.device("cuda"))
    watch = Stopwatch()
    for _ in range(profiled.num_steps):
        train_step()
        torch.cuda.synchronize()
        elapsed_ms = watch.elapsed_s * 1e3  # without the end of the profiler
        profiled()
    # Other tests may use the device meanwhile.
    slower_ms = max(step_ms, elapsed_ms / profiled.num_steps)
    return slower_ms, profiled.summarise(step_ms)


def test_hardly_any_kernel_is_unknown(measured: tuple[float, StepProfile]) -> None:
    _, profile = measured
    assert profile.kinds_ms.get("other", 0.0) < 0.1 * sum(profile.kinds_ms.values()), profile.kernels


@pytest.mark.parametrize("kind", [CONV, NORM, SMALL, COPIES, OPTIMIZER])
def test_what_an_eager_bf16_u_net_does_is_found(measured: tuple[float, StepProfile], kind: str) -> None:
    assert measured[1].kinds_ms[kind] > 0


def test_the_device_is_never_busier_than_the_clock_shows(measured: tuple[float, StepProfile]) -> None:
    step_ms, profile = measured
    # Kernels may run a little slower under the profiler: 10 % held on an H200. One stream: nothing overlaps.
    assert 0 < sum(profile.kinds_ms.values()) < 1.1 * step_ms
    assert profile.idle_ms <= step_ms
