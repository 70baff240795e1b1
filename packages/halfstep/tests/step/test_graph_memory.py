"""What the allocator is told around a capture; tests/gpu has the allocator itself."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from halfstep.step import graph as graph_memory
from halfstep.step.graph import CONFIG_KEY, SETTING, use_growing_segments


class Allocator:
    """As torch's answers: the last words it was told, and whether segments grow."""

    def __init__(self, said: str = "") -> None:
        self.said, self.told = said, list[str]()

    def snapshot(self) -> dict[str, Any]:
        return {"allocator_settings": {CONFIG_KEY: self.said, SETTING: self.said.endswith(f"{SETTING}:True")}}

    def tell(self, words: str) -> None:
        self.said = words
        self.told.append(words)


def in_place(monkeypatch: pytest.MonkeyPatch, allocator: Allocator) -> Allocator:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(graph_memory, "_users_settings", {})
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", allocator.snapshot)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", allocator.tell)
    return allocator


def test_segments_grow_within_and_words_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    allocator = in_place(monkeypatch, Allocator("roundup_power2_divisions:[256:1,512:2]"))
    for _ in range(2):
        with use_growing_segments():
            assert allocator.snapshot()["allocator_settings"][SETTING]
        assert allocator.said == "roundup_power2_divisions:[256:1,512:2],expandable_segments:False"
    assert len(allocator.told) == 4


def test_an_error_within_leaves_the_allocator_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    allocator = in_place(monkeypatch, Allocator())
    with pytest.raises(ValueError, match="broken"), use_growing_segments():
        raise ValueError("broken")
    assert allocator.said == "expandable_segments:False"


@pytest.mark.parametrize("said", ["expandable_segments:True", "expandable_segments:False"])
def test_who_says_whether_segments_may_grow_is_not_overruled(monkeypatch: pytest.MonkeyPatch, said: str) -> None:
    allocator = in_place(monkeypatch, Allocator(said))
    with use_growing_segments():
        assert allocator.said == said
    assert not allocator.told
