"""A captured graph's memory on a real GPU: in segments that grow, and the allocator as it was afterwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from halfstep.measure.memory import peak_memory_bytes
from halfstep.train.graph_memory import SAID, SETTING, growing_segments

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda", 0)
MEGABYTE = 2**20


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
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    base = torch.cuda.memory_allocated()
    graph = captured_with_gaps()
    torch.cuda.reset_peak_memory_stats()
    held = peak_memory_bytes(CUDA)
    assert held is not None
    graph.replay()
    torch.cuda.synchronize()
    return held - base


def test_a_graph_holds_little_more_than_its_tensors_ever_took() -> None:
    in_pieces = counted()
    with growing_segments():
        grown = counted()
    assert grown >= (60 + 62) * MEGABYTE  # the two largest live at the same time
    assert in_pieces >= sum(range(34, 64, 2)) * MEGABYTE  # each has a piece of its own
    assert grown < 0.5 * in_pieces


def test_the_allocator_is_as_it_was_and_keeps_what_a_user_told_it() -> None:
    told = settings()[SAID]
    try:
        torch._C._accelerator_setAllocatorSettings("garbage_collection_threshold:0.95,expandable_segments:False")
        for _ in range(2):
            with growing_segments():
                assert settings()[SETTING]
                assert settings()["garbage_collection_threshold"] == pytest.approx(0.95)
            assert not settings()[SETTING]
            assert settings()["garbage_collection_threshold"] == pytest.approx(0.95)
        assert settings()[SAID].count(SETTING) == 1
    finally:
        torch._C._accelerator_setAllocatorSettings(told or "garbage_collection_threshold:0.0,expandable_segments:False")


def test_who_has_such_segments_anyway_keeps_them() -> None:
    torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    try:
        with growing_segments():
            assert settings()[SETTING]
        assert settings()[SETTING]
    finally:
        torch._C._accelerator_setAllocatorSettings("expandable_segments:False")
