"""A small U-Net's real kernels: all of them known, and what was switched off is advised."""

from __future__ import annotations

import pytest
import torch

from halfstep_train.bench.explain import Explanation, StepFacts, explain
from halfstep_train.bench.problem import AfterStep
from halfstep_train.bench.step_profile import OpKind
from halfstep_train.workloads.segmentation.unet import UNet

pytestmark = pytest.mark.gpu

STEPS = 5


class EagerUNet:
    """The loop of the guides: autocast, contiguous layout, foreach AdamW, a copy from pinned memory in each step."""

    name, variant, precision = "unet", "eager", "bf16"

    def train(self, steps: int, after_step: AfterStep) -> float:
        torch.manual_seed(0)
        model = UNet(base_channels=32).cuda()
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        images = torch.randint(256, (8, 3, 256, 256), dtype=torch.uint8).pin_memory()
        masks = torch.randint(2, (8, 256, 256)).pin_memory()
        loss = torch.tensor(0.0)
        for _ in range(steps):
            pixels, targets = images.cuda(non_blocking=True).float() / 255, masks.cuda(non_blocking=True)
            with torch.autocast("cuda", torch.bfloat16):
                loss = torch.nn.functional.cross_entropy(model(pixels), targets)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            after_step()
        return float(loss.detach())


@pytest.fixture(scope="module")
def explanation() -> Explanation:
    facts = StepFacts(
        channels_last=False,
        device=torch.device("cuda"),
        device_name=torch.cuda.get_device_name(),
    )
    return explain(EagerUNet(), steps=STEPS, facts=facts)


def test_kinds_add_up_and_hardly_any_kernel_is_unknown(explanation: Explanation) -> None:
    times = {row.kind: row.ms for row in explanation.kinds}
    assert sum(times.values()) == pytest.approx(explanation.kernel_ms)
    others = [kernel.name for kernel in explanation.top_kernels if kernel.kind is OpKind.OTHER]
    assert times.get(OpKind.OTHER, 0.0) < 0.1 * explanation.kernel_ms, others


@pytest.mark.parametrize(
    "kind",
    [
        OpKind.CONV_FORWARD,
        OpKind.CONV_INPUT_GRADIENT,
        OpKind.CONV_WEIGHT_GRADIENT,
        OpKind.NORMALISATION,
        OpKind.ELEMENTWISE,
        OpKind.CAST,
        OpKind.OPTIMIZER,
        OpKind.COPY_IN,
    ],
)
def test_what_an_eager_bf16_u_net_does_is_found(explanation: Explanation, kind: OpKind) -> None:
    assert {row.kind: row.share for row in explanation.kinds}.get(kind, 0.0) > 0


def test_the_device_is_never_busier_than_the_clock_says(explanation: Explanation) -> None:
    # Kernels may run a little slower under the profiler, and are timed beside the clock: 10 % held on an H200.
    assert 0 < explanation.busy_ms < 1.1 * explanation.step_ms
    assert explanation.launch_gap_ms <= explanation.step_ms
