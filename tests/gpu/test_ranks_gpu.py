"""A world of one with NCCL, captured, and two processes that share a GPU by gloo: both train what one does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from halfstep.step.graph import GraphedStep
from halfstep_train.run import engine
from halfstep_train.run.launch import Launch
from halfstep_train.run.train import train
from halfstep_train.workloads import load
from ranks_together import free_port, together
from whole_runs import TINY, newest

pytestmark = pytest.mark.gpu

SETTINGS = {**TINY, "device": "cuda", "train.max_steps": 24, "train.epochs": 8, "train.batch_size": 2}
"""22 samples: eleven whole batches an epoch, so that the step is captured after DDP's eleven windows."""


def ranked(rank: int, size: int, port: int, out: Path, settings: dict[str, Any]) -> int:
    """One process of a run: how many steps it captured."""
    launch = Launch(rank=rank, size=size, local_rank=rank, address="127.0.0.1", port=port, by_torchrun=False)
    words = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
    captures = []

    class Counted(GraphedStep):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            captures.append(1)

    engine.GraphedStep = Counted
    train(load("rank_workload:build", overrides=words), out=out, launch=launch)
    return len(captures)


def alone(out: Path, **more: Any) -> Path:
    words = [f"{key}={json.dumps(value)}" for key, value in {**SETTINGS, **more}.items()]
    return train(load("rank_workload:build", overrides=words), out=out)


def assert_near(left: Path, right: Path, atol: float) -> None:
    """24 steps of Adam have moved a weight by up to 0.02."""
    other = newest(right).model
    for name, value in newest(left).model.items():
        torch.testing.assert_close(value, other[name], rtol=0, atol=atol)


@pytest.mark.parametrize("fast", ["off", "compile", "graph"])
def test_a_world_of_one_with_nccl_trains_as_without(fast: str, tmp_path: Path) -> None:
    more = {"train.fast": fast, "train.backend": "nccl"}
    (captures,) = together(1, ranked, tmp_path / "ends", tmp_path / "world", {**SETTINGS, **more})
    assert_near(tmp_path / "world", alone(tmp_path / "alone", **{"train.fast": fast}), atol=1e-5)
    # What a capture that failed leaves behind: the way that steps ran in.
    assert newest(tmp_path / "world").state["mode"] == {"off": "eager"}.get(fast, fast)
    assert captures == (fast == "graph")


def test_two_processes_on_one_gpu_by_gloo_train_what_one_does(tmp_path: Path) -> None:
    more = {"train.backend": "gloo", "train.fast": "off"}
    together(2, ranked, tmp_path / "ends", tmp_path / "world", {**SETTINGS, **more})
    # Sums over other batches: fp32's rounding, through 24 steps of Adam.
    assert_near(tmp_path / "world", alone(tmp_path / "alone", **{"train.fast": "off"}), atol=2e-4)


def synced(rank: int, size: int, port: int) -> tuple[torch.Tensor, torch.Tensor]:
    """One step of a model with SyncBatchNorm: one sample here, seven there."""
    from datetime import timedelta

    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    import halfstep as hs

    where = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", where, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    torch.manual_seed(0)
    net: nn.Module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)).cuda()
    if size > 1:
        net = DistributedDataParallel(nn.SyncBatchNorm.convert_sync_batchnorm(net), device_ids=[0])
    step = hs.Step(net, torch.optim.SGD(net.parameters(), lr=0.1, fused=True), "fp32")
    rows = torch.randn(8, 4, generator=torch.Generator().manual_seed(1)).cuda()
    own = rows if size == 1 else rows[:1] if rank == 0 else rows[1:]
    for _ in range(3):
        step(lambda x: (net(x) - x).pow(2).mean(), [own])
    weights = torch.cat([p.detach().flatten() for p in net.parameters()]).cpu()
    statistics = torch.cat([b.detach().flatten().double() for b in net.buffers()]).cpu()
    dist.destroy_process_group()
    return weights, statistics


def test_one_and_seven_samples_with_sync_batch_norm_are_eight(tmp_path: Path) -> None:
    (expected,) = together(1, synced, tmp_path / "one")
    for own in together(2, synced, tmp_path / "two"):
        for found, whole in zip(own, expected, strict=True):
            torch.testing.assert_close(found, whole, rtol=1e-4, atol=1e-5)


def test_processes_without_a_gpu_each_are_refused_unless_they_share_it(tmp_path: Path) -> None:
    from halfstep.errors import ConfigError
    from halfstep_train.run.launch import choose_device

    count = torch.cuda.device_count()
    launch = Launch(rank=count, size=count + 1, local_rank=count, address="127.0.0.1", port=free_port())
    config = load("rank_workload:build", overrides=["device=cuda", "data.dir=anywhere"]).config
    with pytest.raises(ConfigError, match="has no GPU"):
        choose_device(config.device, config.train.backend, launch)
