"""A sharded run in a world of one with NCCL: it trains what an unsharded one does, within the memory of the plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from half_gather import check_half_gather, train_gathered_in_half
from halfstep_train.run.launch import Launch
from halfstep_train.run.train import train
from halfstep_train.tune.modes import Mode
from halfstep_train.workloads import load
from ranks_together import together
from whole_runs import TINY, newest

pytestmark = pytest.mark.gpu

SETTINGS = {**TINY, "device": "cuda", "train.max_steps": 12, "train.batch_size": 2, "ema.enabled": True,
            "schedule.name": "constant", "schedule.warmup_steps": 0}  # fmt: skip


def trained(rank: int, size: int, port: int, out: Path, settings: dict[str, Any]) -> None:
    launch = Launch(rank=rank, size=size, local_rank=rank, address="127.0.0.1", port=port, by_torchrun=False)
    words = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
    train(load("sharded_workload:build", overrides=words), out=out, launch=launch)


@pytest.mark.parametrize("fast", ["off", "graph"])
@pytest.mark.parametrize(("precision", "gather"), [("fp32", "fp32"), ("bf16", "fp32"), ("bf16", "bf16")])
def test_a_sharded_world_of_one_trains_as_without(precision: str, gather: str, fast: str, tmp_path: Path) -> None:
    own = {**SETTINGS, "precision.default": precision, "train.fast": fast}
    more = {"train.shard": True, "train.shard_gather": gather, "train.backend": "nccl"}
    together(1, trained, tmp_path / "ends", tmp_path / "sharded", {**own, **more})
    words = [f"{key}={json.dumps(value)}" for key, value in own.items()]
    alone = newest(train(load("sharded_workload:build", overrides=words), out=tmp_path / "alone"))
    shards = newest(tmp_path / "sharded")
    assert shards.state["mode"] == {"off": "eager"}.get(fast, "compile")
    # bf16 rounds to 8 bits, and compiled code rounds at other places; 12 steps of Adam move a weight by up to 0.012.
    atol = 1e-5 if precision == "fp32" else 4e-3
    for name, value in alone.model.items():
        torch.testing.assert_close(shards.model[name], value, rtol=0, atol=atol)


@pytest.mark.parametrize("mode", ["eager", "compile"])
def test_blocks_gathered_in_bf16_keep_norms_in_fp32_and_drop_bad_steps(mode: Mode, tmp_path: Path) -> None:
    [own] = together(1, train_gathered_in_half, tmp_path, "cuda:0", mode)
    check_half_gather(own)
    assert own["reason"] == "loss is nan (rank 0)"
    assert own["remarks"] == []
    assert bool(own["formats"]) is (mode == "eager")
