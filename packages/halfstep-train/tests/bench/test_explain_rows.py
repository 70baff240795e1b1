"""What is known of halfstep's own rows and of a peer's, and rows that cannot be explained."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from halfstep.errors import ConfigError
from halfstep.hardware.device_facts import Hardware, Measurement
from halfstep.hardware.probe import probe
from halfstep_train.bench.bench import HalfstepRunner
from halfstep_train.bench.explain import (
    Explanation,
    NotExplained,
    collect_step_facts,
    explain_rows,
    refuse_unexplainable,
)
from halfstep_train.bench.measure_row import Row
from halfstep_train.bench.peers import list_peers
from halfstep_train.bench.problem import AfterStep, Problem, build_problem, load_bench_config

FLOPS = 10**6
SIZE = ["model.base_channels=4", "model.depth=1", "train.batch_size=2", "data.image_size=16"]


@pytest.fixture(scope="module")
def problem() -> Problem:
    return build_problem(load_bench_config("unet", SIZE, {"device": "cpu"}, small=True), torch.device("cpu"))


@pytest.fixture(scope="module")
def hardware() -> Hardware:
    """This CPU, with rates as a measurement would find them."""

    def rate(op: str, name: str, tflops: float) -> Measurement:
        return Measurement(op=op, format=name, tflops=tflops, error=0.0, speedup=1.0)  # type: ignore[arg-type]

    rates = (rate("matmul", "fp32", 0.1), rate("conv_nchw", "fp32", 0.02), rate("conv_nhwc", "fp32", 0.03))
    return dataclasses.replace(probe("cpu"), measurements=rates, bandwidth_gb_s=12.0)


def ours(problem: Problem, hardware: Hardware, mode: str = "eager", *, simulate: bool = False) -> HalfstepRunner:
    return HalfstepRunner(problem, "bf16" if simulate else "fp32", mode, hardware, simulate=simulate)  # type: ignore[arg-type]


def test_halfsteps_own_step_is_known_to_be_in_its_layout(problem: Problem, hardware: Hardware) -> None:
    facts = collect_step_facts(ours(problem, hardware), problem, hardware, FLOPS)
    assert (facts.channels_last, facts.bandwidth_gb_s) == (True, 12.0)
    assert facts.floor_ms == pytest.approx(FLOPS / 0.1e12 * 1e3)


@pytest.mark.parametrize(("variant", "by_hand"), [("documented", False), ("tuned", True), ("graphs", True)])
def test_a_peer_is_known_by_how_far_its_user_went(
    problem: Problem, hardware: Hardware, variant: str, by_hand: bool
) -> None:
    [peer] = list_peers([f"plain:{variant}"], problem, "bf16")
    assert collect_step_facts(peer, problem, hardware, FLOPS).channels_last == by_hand


def test_a_peer_that_keeps_the_contiguous_layout_in_strict_fp32_on_cuda_is_known_to(
    problem: Problem, hardware: Hardware
) -> None:
    on_cuda = dataclasses.replace(problem, device=torch.device("cuda"))
    [peer] = list_peers(["plain:tuned"], on_cuda, "fp32")
    assert not collect_step_facts(peer, on_cuda, hardware, FLOPS).channels_last


def test_rows_are_explained_or_say_why_not(problem: Problem, hardware: Hardware) -> None:
    class OutOfMemory(HalfstepRunner):
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


@pytest.mark.parametrize(("modes", "steps"), [(["eager", "auto"], 5), (["eager"], 2)])
def test_what_no_row_could_be_explained_with_is_refused_at_once(modes: list[str], steps: int) -> None:
    with pytest.raises(ConfigError, match="auto" if "auto" in modes else "--steps 2 is too few"):
        refuse_unexplainable(modes, steps)
