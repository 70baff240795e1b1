"""Slots told from those of all processes: two with two clips each have the loss and gradients of one with four."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from halfstep_train.workloads.base.frozen_vae import compute_adaptive_weight
from halfstep_train.workloads.base.over_ranks import gather_over_ranks
from halfstep_train.workloads.slots.scores import slot_contrast
from ranks_together import together

pytestmark = pytest.mark.ranks

CLIPS = torch.randn(5, 3, 2, 6, generator=torch.Generator().manual_seed(1))
REAL = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 1, 1], [1, 0, 0], [1, 1, 1]], dtype=torch.bool)
CASES: dict[str, tuple[list[int], bool]] = {
    "two and two": ([2, 2], False),
    "three and two": ([3, 2], False),
    "five and none": ([5, 0], False),
    "with frames that fill up": ([3, 2], True),
}
"""By case: clips of each process, and whether some frames are not real."""


def contrast(net: nn.Module, clips: Tensor, real: Tensor | None) -> Tensor:
    return slot_contrast(net(clips), is_real=real)


def balance(net: nn.Module, clips: Tensor) -> Tensor:
    seen = net(clips)
    last: Any = list(net.parameters())[-2]
    return compute_adaptive_weight(seen.square().mean(), seen.mean(), last, scales=(2.0, 4.0))


def made() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))


def gradients(net: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None])


def scenario(rank: int, size: int, port: int) -> dict[str, Any]:
    where = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", where, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    found = {}
    for name, (rows, filled) in CASES.items():
        net = made()
        model = DistributedDataParallel(net)
        own = slice(sum(rows[:rank]), sum(rows[: rank + 1])) if rows[rank] else slice(0, 1)
        gathers: list[int] = []
        with gather_over_ranks(rows, rank, lambda gathers=gathers: gathers.append(1)):
            loss = contrast(model, CLIPS[own], REAL[own] if filled else None)
        share = loss * rows[rank] / sum(rows)
        (share * size).backward()  # DDP takes the mean
        dist.all_reduce(loss := share.detach().clone())
        found[name] = (loss, gradients(net), bool(gathers))
        with gather_over_ranks(rows, rank, lambda: None):
            found[f"balance, {name}"] = balance(net, CLIPS[own])
        del model  # while the others are there: it waits for what it sent them
    dist.barrier()
    dist.destroy_process_group()
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return together(2, scenario, tmp_path_factory.mktemp("contrast"))


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradients_are_those_of_one_process(name: str, found: list[dict[str, Any]]) -> None:
    rows, filled = CASES[name]
    net, num = made(), sum(rows)
    whole = contrast(net, CLIPS[:num], REAL[:num] if filled else None)
    whole.backward()
    for loss, own, gathers in (ranks[name] for ranks in found):
        torch.testing.assert_close(loss, whole.detach(), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(own, gradients(net), rtol=1e-4, atol=1e-6)
        assert gathers


@pytest.mark.parametrize("name", CASES)
def test_a_discriminators_weight_is_that_of_the_whole_batch(name: str, found: list[dict[str, Any]]) -> None:
    whole = balance(made(), CLIPS[: sum(CASES[name][0])])
    for ranks in found:
        torch.testing.assert_close(ranks[f"balance, {name}"], whole, rtol=1e-5, atol=0)


def test_one_process_gathers_nothing() -> None:
    net = made()
    expected = contrast(net, CLIPS[:2], None)
    assert not torch.equal(expected, contrast(net, CLIPS[:4], None))
