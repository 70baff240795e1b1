"""A small U-Net's real kernels: all of them known, and what was switched off is advised."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor

from halfstep.bench.explain import StepFacts, explain
from halfstep.bench.explain_kernels import Kind
from halfstep.bench.explain_rows import explain_rows, on_own_data
from halfstep.bench.ours import Ours
from halfstep.bench.problem import AfterStep, problem_for
from halfstep.bench.settings import bench_config
from halfstep.data.loader import Samples
from halfstep.hardware.probe import probe
from halfstep.models.unet import UNet
from halfstep.report.explain_view import Explanation
from halfstep.workloads.segmentation.demo import write_demo

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
        precision="bf16",
        channels_last=False,
        device=torch.device("cuda"),
        device_name=torch.cuda.get_device_name(),
    )
    return explain(EagerUNet(), steps=STEPS, facts=facts)


def test_kinds_add_up_and_hardly_any_kernel_is_unknown(explanation: Explanation) -> None:
    times = {row.kind: row.ms for row in explanation.kinds}
    assert sum(times.values()) == pytest.approx(explanation.kernel_ms)
    others = [kernel.name for kernel in explanation.top_kernels if kernel.kind is Kind.OTHER]
    assert times.get(Kind.OTHER, 0.0) < 0.1 * explanation.kernel_ms, others


@pytest.mark.parametrize(
    "kind",
    [
        Kind.CONV_FORWARD,
        Kind.CONV_INPUT_GRADIENT,
        Kind.CONV_WEIGHT_GRADIENT,
        Kind.NORMALISATION,
        Kind.ELEMENTWISE,
        Kind.CAST,
        Kind.OPTIMIZER,
        Kind.COPY_IN,
    ],
)
def test_what_an_eager_bf16_u_net_does_is_found(explanation: Explanation, kind: Kind) -> None:
    assert {row.kind: row.share for row in explanation.kinds}.get(kind, 0.0) > 0


def test_the_device_is_never_busier_than_the_clock_says(explanation: Explanation) -> None:
    # Kernels may run a little slower under the profiler, and are timed beside the clock: 10 % held on an H200.
    assert 0 < explanation.busy_ms < 1.1 * explanation.step_ms
    assert explanation.launch_gap_ms <= explanation.step_ms


class SlowSamples:
    def __init__(self, samples: Samples) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def sample(self, index: int, *, key: tuple[int, int, int]) -> dict[str, Tensor]:
        time.sleep(0.02)
        return self.samples.sample(index, key=key)


def test_a_captured_step_that_waits_for_its_own_data_says_so(tmp_path: Path) -> None:
    write_demo(tmp_path / "pairs", num_images=40, side=64)
    size = ["model.base_channels=16", "model.depth=2", "train.batch_size=4", "data.image_size=64", "data.num_workers=2"]
    random = problem_for(bench_config("unet", size, {"device": "cuda"}, small=False), torch.device("cuda", 0))
    problem = on_own_data(random, str(tmp_path / "pairs"))
    assert problem.own_data is not None
    slow = dataclasses.replace(problem.own_data, train_samples=SlowSamples(problem.own_data.train_samples))
    problem, hardware = dataclasses.replace(problem, own_data=slow), probe("cuda")
    runner = Ours(problem, "bf16", "graph", hardware, simulate=False)
    [found] = explain_rows([runner], problem, hardware, steps=STEPS, flops=10**9)
    assert isinstance(found, Explanation), found.reason
    # Two workers bring a batch in 40 ms, and the step takes a few.
    assert found.data_wait_ms is not None
    assert 20 < found.data_wait_ms < found.step_ms
    assert "waiting for the loader" in found.notes[0]
    assert found.launch_gap_ms < 0.5 * found.step_ms
