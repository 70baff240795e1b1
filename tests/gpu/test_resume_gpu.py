"""A loop on a GPU resumes bit-exactly: dropout draws from CUDA's generator, and batches are copied ahead."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import halfstep as hs
from resumed_loops import Drawing, Plain, close, make_step, seed_all

pytestmark = pytest.mark.gpu


class Pair(NamedTuple):
    x: Tensor
    names: list[str]


def collate(samples: list[Tensor]) -> Pair:
    return Pair(torch.stack(samples), ["name"] * len(samples))


def run(path: Path, loader: dict[str, Any], *, stop: int = -1, resumes: bool = False) -> dict[str, Tensor]:
    seed_all()
    model = nn.Sequential(nn.Linear(4, 32), nn.BatchNorm1d(32), nn.Dropout(0.3), nn.Linear(32, 1)).cuda()
    step = make_step(model, precision="bf16", ema_decay=0.9, accumulate=2)
    batches = DataLoader(batch_size=4, shuffle=True, collate_fn=collate, **loader)
    if resumes:
        hs.load(path, step, model)
    for _ in range(step.epoch, 3):
        for window in step.windows(hs.prefetch(batches, "cuda")):
            step(lambda pair: model(pair.x).square().mean(), window)
            if step.attempted == stop:
                hs.save(path, step, model)
                close(batches)
                return {}
    close(batches)
    return dict(model.state_dict())


@pytest.mark.parametrize(
    "loader",
    [
        {"dataset": Drawing()},
        {"dataset": Plain(), "num_workers": 2, "persistent_workers": True},
        {"dataset": Drawing(), "num_workers": 2, "pin_memory": True},
    ],
    ids=["drawing", "persistent workers", "drawing workers"],
)
@pytest.mark.filterwarnings("ignore:resuming loads:UserWarning", "ignore:.*fork.*:DeprecationWarning")
def test_a_resumed_loop_is_bit_equal(tmp_path: Path, loader: dict[str, Any]) -> None:
    whole = run(tmp_path / "none", loader)
    assert all(torch.equal(value, run(tmp_path / "none", loader)[name]) for name, value in whole.items())
    for stop in (2, 5):
        run(tmp_path / "state", loader, stop=stop)
        resumed = run(tmp_path / "state", loader, resumes=True)
        for name, value in whole.items():
            assert torch.equal(value, resumed[name]), (name, stop)
