"""The recipe of docs/loop_kinds.md for sequences of many lengths: few shapes, nothing counted twice, exact resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader

from doc_pages import blocks
from resumed_loops import Loop

PAGE = Path(__file__).resolve().parent.parent / "docs" / "loop_kinds.md"


@pytest.fixture
def recipe() -> dict[str, Any]:
    first, *others = (block.text for block in blocks(PAGE, "python"))
    names: dict[str, Any] = {}
    for code in (first, next(text for text in others if "BucketSampler" in text)):
        exec(compile(code, "docs/loop_kinds.md", "exec"), names)
    return names


def test_500_lengths_need_eight_shapes_and_lose_less_than_a_batch_of_each(recipe: dict[str, Any]) -> None:
    texts = [torch.ones(length, dtype=torch.long) for length in range(12, 512)]
    lengths = [len(text) for text in texts]
    recipe["ends"] = ends = recipe["choose_ends"](lengths)
    sampler = recipe["BucketSampler"](lengths, ends, 4)
    batches = list(DataLoader(texts, batch_sampler=sampler, collate_fn=recipe["pad"]))  # type: ignore[arg-type]
    assert len({tuple(batch["x"].shape) for batch in batches}) == len(ends) == 8
    assert len(batches) == len(sampler) > 500 / 4 - 8
    sizes = [int((batch["x"] > 0).sum(1)[k]) for batch in batches for k in range(4)]
    assert len(set(sizes)) == len(sizes), "no sample comes twice"
    padded = sum(batch["x"].numel() for batch in batches) / sum(sizes)
    assert padded < 1.2, "quantiles of the lengths leave little padding"
    batch = batches[0]
    real = torch.arange(batch["x"].shape[1]) < (batch["x"] > 0).sum(1, keepdim=True) - 1
    assert torch.equal(batch["y"] != -100, real), "the last token has no target"


def test_it_resumes_with_the_very_next_batch(recipe: dict[str, Any], tmp_path: Path) -> None:
    samples = [torch.linspace(0, 1, length) for length in range(1, 40)]
    lengths = [len(sample) for sample in samples]
    ends = [8, 24, 40]
    loaded: list[int] = []

    def pad(batch: list[torch.Tensor]) -> torch.Tensor:
        loaded.append(len(batch))
        end = next(end for end in ends if end >= max(map(len, batch)))
        return torch.stack([F.pad(sample, (0, end - len(sample))) for sample in batch])[:, :4]

    def make_loader() -> Any:
        sampler = recipe["BucketSampler"](lengths, ends, 3)
        return DataLoader(samples, batch_sampler=sampler, collate_fn=pad)  # type: ignore[arg-type]

    whole = Loop(make_loader, epochs=2).run()
    path = tmp_path / "state.safetensors"
    first = Loop(make_loader, epochs=2).run(path, stop=5)
    loaded.clear()
    second = Loop(make_loader, epochs=2).run(path, resumes=True)
    assert len(loaded) == len(second.batches), "no skipped batch was loaded again"
    assert second.warnings == []
    seen = [*first.batches, *second.batches]
    assert all(torch.equal(one, other) for one, other in zip(whole.batches, seen, strict=True))
    assert all(torch.equal(value, second.model.state_dict()[name]) for name, value in whole.model.state_dict().items())
