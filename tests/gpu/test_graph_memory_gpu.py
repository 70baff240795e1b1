"""A captured graph's memory on a real GPU: in segments that grow, and the allocator as it was afterwards."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from halfstep.hardware.memory import get_peak_memory_bytes, release_unused_memory
from halfstep.step.graph import CONFIG_KEY, SETTING, GraphedStep, use_growing_segments
from halfstep.step.step import GuardedStep
from halfstep_train.tune.fresh_thread import run_in_fresh_thread
from halfstep_train.tune.modes import UNCAPTURED
from tiny_training import batch, loss_of, make_step

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda", 0)
MEGABYTE = 2**20
UNLIMITED_MB = 10**6


def settings() -> dict[str, Any]:
    return dict(torch.cuda.memory._snapshot()["allocator_settings"])


def captured_with_gaps() -> torch.cuda.CUDAGraph:
    """Maps that grow as others go: none fits into the gap of the last."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        before = torch.ones(32 * MEGABYTE, dtype=torch.uint8, device=CUDA)
        for size in range(34, 64, 2):
            after = torch.ones(size * MEGABYTE, dtype=torch.uint8, device=CUDA)
            before = after
        del before, after
    return graph


def counted() -> int:
    release_unused_memory(CUDA)
    torch.cuda.reset_peak_memory_stats()
    base = get_peak_memory_bytes(CUDA)  # graphs of other tests may be alive
    assert base is not None
    graph = captured_with_gaps()
    torch.cuda.reset_peak_memory_stats()
    held = get_peak_memory_bytes(CUDA)
    assert held is not None
    graph.replay()
    torch.cuda.synchronize()
    return held - base


def test_a_graph_holds_little_more_than_its_tensors_ever_took() -> None:
    in_pieces = counted()
    with use_growing_segments():
        grown = counted()
    assert grown >= (60 + 62) * MEGABYTE  # the two largest live at the same time
    assert in_pieces >= sum(range(34, 64, 2)) * MEGABYTE  # each has a piece of its own
    assert grown < 0.5 * in_pieces


@contextlib.contextmanager
def told(words: str) -> Iterator[None]:
    before = settings()[CONFIG_KEY]
    torch._C._accelerator_setAllocatorSettings(words)
    try:
        yield
    finally:
        default = f"max_split_size_mb:{UNLIMITED_MB},expandable_segments:False"
        torch._C._accelerator_setAllocatorSettings(",".join(filter(None, [default, before])))


def test_the_allocator_is_as_it_was_and_keeps_what_a_user_told_it() -> None:
    with told("max_split_size_mb:200"):
        for _ in range(3):
            with use_growing_segments():
                assert settings()[SETTING]
                assert settings()["max_split_size"] == 200 * MEGABYTE
            assert not settings()[SETTING]
            assert settings()["max_split_size"] == 200 * MEGABYTE
            assert settings()[CONFIG_KEY].count(SETTING) == 1


@pytest.mark.parametrize("word", ["True", "False"])
def test_who_says_whether_segments_may_grow_is_not_overruled(word: str) -> None:
    with told(f"max_split_size_mb:{UNLIMITED_MB},expandable_segments:{word}"):
        with use_growing_segments():
            assert settings()[SETTING] is (word == "True")
        assert settings()[SETTING] is (word == "True")


def test_nothing_is_left_of_a_graph_that_multiplied() -> None:
    """cuBLAS keeps a workspace in the graph's memory, which would hold all of it."""

    def captured() -> torch.cuda.CUDAGraph:
        left = torch.ones(1024, 1024, device=CUDA)
        left = left @ left  # a new thread's cuBLAS cannot start within a capture
        graph = torch.cuda.CUDAGraph()
        with use_growing_segments(), torch.cuda.graph(graph):
            for _ in range(3):
                left = left @ left
        return graph

    release_unused_memory(CUDA)
    before = torch.cuda.memory_reserved()
    run_in_fresh_thread(captured, CUDA).replay()
    torch.cuda.synchronize()
    assert torch.cuda.memory_reserved() > before
    release_unused_memory(CUDA)
    assert torch.cuda.memory_reserved() == before


def test_a_graph_that_is_dropped_while_it_runs_ends_before_its_memory_is_gone() -> None:
    """Unmapped memory would be an illegal access."""
    step = make_step("sgd", "fp32", device="cuda")
    for k in range(UNCAPTURED):
        step(loss_of(step.model), [batch(k, device="cuda")])
    graph = GraphedStep(step, slow_loss_of(step), [batch(0, device="cuda")], torch.cuda.graph_pool_handle())
    for k in range(20):
        graph([batch(k, device="cuda")])
    del graph
    torch.cuda.empty_cache()
    torch.cuda.synchronize()
    assert all(bool(parameter.isfinite().all()) for parameter in step.model.parameters())


def test_a_graph_outlives_the_one_captured_before_it() -> None:
    """cuBLAS would keep the workspace of both in the memory of the first, until torch's own graphs clear it."""
    steps = [make_step("sgd", "fp32", device="cuda") for _ in range(2)]
    batches = [batch(k, device="cuda") for k in range(UNCAPTURED)]
    rows = torch.ones(64, 2**18, device="cuda", dtype=torch.bfloat16)
    graphs = []
    for step in steps:
        # The partial sums of a product of long vectors are in cuBLAS's workspace.
        split = add_product(loss_of(step.model), rows)
        for b in batches:
            step(split, [b])
        graphs.append(GraphedStep(step, split, batches[:1], torch.cuda.graph_pool_handle()))
    del graphs[0]
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    for b in batches * 5:
        graphs[0]([b])
    torch.cuda.synchronize()
    assert all(bool(parameter.isfinite().all()) for parameter in steps[1].model.parameters())


def add_product(loss: Callable[[dict[str, Tensor]], Tensor], rows: Tensor) -> Callable[[dict[str, Tensor]], Tensor]:
    return lambda b: loss(b) + 0 * (rows @ rows.T)[0, 0].float()


def slow_loss_of(step: GuardedStep) -> Callable[[dict[str, Tensor]], Tensor]:
    """With some milliseconds of work in memory of its own."""
    loss = loss_of(step.model)

    def slow(b: dict[str, Tensor]) -> Tensor:
        large = torch.ones(4096, 4096, device="cuda")
        for _ in range(20):
            large = (large @ large).clamp(max=1.0)
        return loss(b) + 0 * large[0, 0]

    return slow
