"""What is known of halfstep's own rows and of a peer's, and rows that cannot be explained."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

import numpy
import pytest
import torch
from PIL import Image
from torch import Tensor

from halfstep.bench.explain_rows import NotExplained, explain_rows, facts_of, on_own_data, refuse_unexplainable
from halfstep.bench.explain_trace import SETTLING_STEPS, WARM_UP_STEPS
from halfstep.bench.ours import Ours
from halfstep.bench.peers import peers
from halfstep.bench.problem import AfterStep, Problem, problem_for
from halfstep.bench.row import Row
from halfstep.bench.settings import bench_config
from halfstep.data.loader import BATCHES_A_THREAD, Samples
from halfstep.errors import ConfigError
from halfstep.hardware.facts import Hardware, Measurement
from halfstep.hardware.probe import probe
from halfstep.report.explain_view import Explanation

FLOPS = 10**6
SIZE = ["model.base_channels=4", "model.depth=1", "train.batch_size=2", "data.image_size=16"]


@pytest.fixture(scope="module")
def problem() -> Problem:
    return problem_for(bench_config("unet", SIZE, {"device": "cpu"}, small=True), torch.device("cpu"))


@pytest.fixture(scope="module")
def hardware() -> Hardware:
    """This CPU, with rates as a measurement would find them."""

    def rate(op: str, name: str, tflops: float) -> Measurement:
        return Measurement(op=op, format=name, tflops=tflops, error=0.0, speedup=1.0)  # type: ignore[arg-type]

    rates = (rate("matmul", "fp32", 0.1), rate("conv_nchw", "fp32", 0.02), rate("conv_nhwc", "fp32", 0.03))
    return dataclasses.replace(probe("cpu"), measurements=rates, bandwidth_gb_s=12.0)


def ours(problem: Problem, hardware: Hardware, mode: str = "eager", *, simulate: bool = False) -> Ours:
    return Ours(problem, "bf16" if simulate else "fp32", mode, hardware, simulate=simulate)  # type: ignore[arg-type]


def test_halfsteps_own_step_is_known_to_be_in_its_layout(problem: Problem, hardware: Hardware) -> None:
    facts = facts_of(ours(problem, hardware), problem, hardware, FLOPS)
    assert (facts.channels_last, facts.bandwidth_gb_s) == (True, 12.0)
    assert facts.floor_ms == pytest.approx(FLOPS / 0.1e12 * 1e3)


@pytest.mark.parametrize(("variant", "by_hand"), [("documented", False), ("tuned", True), ("graphs", True)])
def test_a_peer_is_known_by_how_far_its_user_went(
    problem: Problem, hardware: Hardware, variant: str, by_hand: bool
) -> None:
    [peer] = peers([f"plain:{variant}"], problem, "bf16")
    assert facts_of(peer, problem, hardware, FLOPS).channels_last == by_hand


def test_a_peer_that_keeps_the_contiguous_layout_in_strict_fp32_on_cuda_is_known_to(
    problem: Problem, hardware: Hardware
) -> None:
    on_cuda = dataclasses.replace(problem, device=torch.device("cuda"))
    [peer] = peers(["plain:tuned"], on_cuda, "fp32")
    assert not facts_of(peer, on_cuda, hardware, FLOPS).channels_last


def test_rows_are_explained_or_say_why_not(problem: Problem, hardware: Hardware) -> None:
    class OutOfMemory(Ours):
        def train(self, steps: int, after_step: AfterStep) -> float:
            raise torch.OutOfMemoryError("tried to allocate too much")

    rows = [
        ours(problem, hardware, simulate=True),
        OutOfMemory(problem, "fp32", "eager", hardware, simulate=False),
        Row(name="halfstep", variant="graph", precision="fp32", reason="needs CUDA"),
        ours(problem, hardware),
    ]
    *refused, explained = explain_rows(rows, problem, hardware, steps=3, flops=FLOPS)
    reasons = [row.reason for row in refused if isinstance(row, NotExplained)]
    assert all(words in reason for words, reason in zip(("simulated", "out of memory", "CUDA"), reasons, strict=True))
    assert isinstance(explained, Explanation)
    assert explained.title == "halfstep eager fp32"
    assert explained.data_wait_ms is None


@pytest.mark.parametrize(("modes", "steps"), [(["eager", "auto"], 5), (["eager"], 2)])
def test_what_no_row_could_be_explained_with_is_refused_at_once(modes: list[str], steps: int) -> None:
    with pytest.raises(ConfigError, match="auto" if "auto" in modes else "2 steps"):
        refuse_unexplainable(modes, steps)


class SlowSamples:
    """A data set that takes its time for each sample."""

    num_read = 0

    def __init__(self, samples: Samples, seconds: float) -> None:
        self.samples, self.seconds = samples, seconds

    def __len__(self) -> int:
        return len(self.samples)

    def sample(self, index: int, *, key: tuple[int, int, int]) -> dict[str, Tensor]:
        SlowSamples.num_read += 1
        time.sleep(self.seconds)
        return self.samples.sample(index, key=key)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """41 pairs: an epoch's last batch is an odd one."""
    folder = tmp_path_factory.mktemp("pairs")
    generator = numpy.random.default_rng(0)
    for name, shape in (("images", (16, 16, 3)), ("masks", (16, 16))):
        (folder / name).mkdir()
        for number in range(45):
            pixels = generator.integers(0, 3 if name == "masks" else 256, shape, dtype=numpy.uint8)
            Image.fromarray(pixels).save(folder / name / f"{number}.png")
    return folder


def explained_on(folder: Path, hardware: Hardware, *, workers: int, sample_s: float) -> Explanation:
    size = [*SIZE, f"data.num_workers={workers}"]
    random = problem_for(bench_config("unet", size, {"device": "cpu"}, small=True), torch.device("cpu"))
    problem = on_own_data(random, str(folder))
    assert problem.own_data is not None
    slow = SlowSamples(problem.own_data.train_samples, sample_s)
    problem = dataclasses.replace(problem, own_data=dataclasses.replace(problem.own_data, train_samples=slow))
    [found] = explain_rows([ours(problem, hardware)], problem, hardware, steps=3, flops=FLOPS)
    assert isinstance(found, Explanation), found.reason
    assert found.data_wait_ms is not None
    return found


def test_the_wait_for_the_users_own_data_is_measured_and_noted(folder: Path, hardware: Hardware) -> None:
    found = explained_on(folder, hardware, workers=0, sample_s=0.03)
    assert 60 <= found.data_wait_ms < found.step_ms
    assert f"{found.data_wait_ms:.2f} ms" in found.notes[0]
    assert "data.num_workers=" in found.notes[0]
    assert explained_on(folder, hardware, workers=0, sample_s=0.0).data_wait_ms < 20


def test_batches_that_come_in_bursts_do_not_hide_a_slow_loader(folder: Path, hardware: Hardware) -> None:
    # Four workers bring four batches at once each 400 ms; three steps, as asked for, would see one such wait or none.
    found = explained_on(folder, hardware, workers=4, sample_s=0.2)
    assert found.num_steps == 8
    assert found.data_wait_ms is not None
    assert found.step_ms > 80
    assert found.data_wait_ms > found.step_ms / 3


def test_batches_read_ahead_while_a_step_compiled_are_thrown_away(folder: Path, hardware: Hardware) -> None:
    SlowSamples.num_read = 0
    explained_on(folder, hardware, workers=0, sample_s=0.0)
    num_steps = WARM_UP_STEPS["cpu"] + SETTLING_STEPS + 3 + 1 + 3
    assert SlowSamples.num_read == 2 * (num_steps + BATCHES_A_THREAD)


def test_own_data_bring_their_own_classes_and_augmentation(folder: Path, problem: Problem) -> None:
    own = on_own_data(problem, str(folder))
    assert own.own_data is not None
    assert own.own_data.store["num_classes"] == 3
    assert own.host_batch["image"].shape == problem.host_batch["image"].shape
    assert own.config.data.dir == str(folder)
