"""Peers on the device, through the real compiler."""

from __future__ import annotations

import functools
import importlib.util
import math

import pytest
import torch
from torch import Tensor, nn

from halfstep.backend_flags import read_effective_leaves
from halfstep_train.bench.peers import list_peers
from halfstep_train.bench.problem import Batch, Problem
from halfstep_train.tune.fresh_thread import run_in_fresh_thread
from halfstep_train.workloads import load
from halfstep_train.workloads.segmentation.scores import segmentation_loss
from halfstep_train.workloads.segmentation.unet import UNet

pytestmark = pytest.mark.gpu

STEPS = 5
CUDA = torch.device("cuda", 0)
AVAILABLE = [
    "plain",
    *(
        pytest.param(name, marks=[] if found else pytest.mark.skip(reason=f"{name} is missing: this was NOT tested"))
        for name in ("lightning", "accelerate")
        for found in [importlib.util.find_spec(name) is not None]
    ),
]


def make_model() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return UNet(in_channels=3, num_classes=2, base_channels=8, depth=1)


def loss(model: nn.Module, batch: Batch) -> Tensor:
    return segmentation_loss(model(batch["image"]), batch["mask"])


def tiny_problem(device: torch.device = CUDA) -> Problem:
    generator = torch.Generator().manual_seed(0)
    image = torch.randint(256, (4, 3, 64, 64), dtype=torch.uint8, generator=generator)
    mask = torch.randint(2, (4, 64, 64), dtype=torch.uint8, generator=generator)
    return Problem(
        config=load("unet").config,
        make_model=make_model,
        host_batch={"image": image.pin_memory(), "mask": mask.pin_memory()},
        prepare=lambda batch: batch | {"image": batch["image"].float() / 255},
        loss=loss,
        device=device,
        lr=1e-3,
        weight_decay=0.01,
        clip_norm=1.0,
        samples=4,
    )


def fp32_loss(problem: Problem) -> float:
    """The last of five steps, eager and on the host."""
    model = problem.make_model().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=problem.lr, weight_decay=problem.weight_decay)
    value = torch.tensor(math.nan)
    for _ in range(STEPS):
        optimizer.zero_grad()
        value = problem.loss(model, problem.prepare(problem.host_batch))
        value.backward()
        nn.utils.clip_grad_norm_(model.parameters(), problem.clip_norm)
        optimizer.step()
    return value.item()


@pytest.mark.parametrize("name", AVAILABLE)
@pytest.mark.parametrize(("precision", "bound"), [("bf16", 2**-6), ("fp16", 2**-8), ("fp32", 1e-4)])
def test_a_peer_trains_as_fp32_on_the_host_does(name: str, precision: str, bound: float) -> None:
    """Bounds: two units in the last place of the format for the loss; fp32 sums in another order over five steps."""
    problem = tiny_problem()
    expected = fp32_loss(problem)
    for runner in list_peers([name, f"{name}:graphs"], problem, precision):
        calls: list[None] = []
        train = functools.partial(runner.train, STEPS, lambda calls=calls: calls.append(None))
        found = run_in_fresh_thread(train, CUDA)  # as in a bench: the compiler's graphs too, and more than once
        assert len(calls) == STEPS, runner.variant
        assert found == pytest.approx(expected, rel=bound), runner.variant


@pytest.mark.parametrize("name", AVAILABLE)
def test_strict_fp32_holds_inside_a_peer(name: str) -> None:
    seen: list[set[str]] = []
    for runner in list_peers([name], tiny_problem(), "fp32"):
        runner.train(1, lambda: seen.append(set(read_effective_leaves().values())))
    assert seen == [{"ieee"}, {"ieee"}]


@pytest.mark.parametrize("name", AVAILABLE)
def test_a_peer_gives_the_devices_memory_back(name: str) -> None:
    problem = tiny_problem()
    runners = list_peers([name, f"{name}:graphs"], problem, "bf16")
    runners[0].train(1, lambda: None)  # cuBLAS keeps a workspace from its first use on
    before = torch.cuda.memory_allocated()
    for runner in runners:
        runner.train(2, lambda: None)
        assert torch.cuda.memory_allocated() <= before, runner.variant
