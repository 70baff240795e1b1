"""A sharded GPT-2 is exported in Hugging Face's format by all ranks together: byte for byte as by one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from halfstep.distributed.launch import Launch
from halfstep.run.assemble import build_workload
from halfstep.run.checkpoint import Checkpoints, load
from halfstep.run.stored_state import load_for_use
from halfstep.run.train import train
from halfstep.workloads import load as load_config
from halfstep.workloads.language.build import export
from ranks_together import together

pytestmark = pytest.mark.ranks

SETTINGS = {
    "data.tokenizer": "characters", "data.num_workers": 0, "device": "cpu", "precision.default": "fp32",
    "model.depth": 2, "model.heads": 2, "model.dim": 16, "model.context": 8, "train.batch_size": 4, "log.quiet": True,
    "log.curves": False, "train.max_steps": 2, "train.shard": True, "ema.enabled": True, "train.rank_timeout_s": 60,
}  # fmt: skip


def run(rank: int, size: int, port: int, out: Path, settings: dict[str, Any]) -> None:
    launch = Launch(rank=rank, size=size, local_rank=rank, address="127.0.0.1", port=port, by_torchrun=False)
    overrides = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
    train(load_config("gpt2", overrides=overrides), out=out, launch=launch)


def test_two_ranks_write_the_file_of_one(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "text.txt").write_text("to be or not to be, that is the question. " * 40)
    out = tmp_path / "run"
    together(2, run, tmp_path / "ends", out, {**SETTINGS, "data.dir": str(tmp_path / "data")})
    checkpoints = Checkpoints(out / "checkpoints")
    checkpoint = load(checkpoints.find_best() or checkpoints.list_all()[-1])
    config = load_config(str(out / "config.yaml")).config
    model = build_workload(config, dict(checkpoint.state["store"])).model
    load_for_use(model, checkpoint)
    export(model, config, checkpoint.state["store"], tmp_path / "alone")
    names = {path.name for path in (tmp_path / "alone").iterdir()}
    assert "model.safetensors" in names
    assert {path.name for path in (out / "model").iterdir()} == names
    for name in names:
        assert (out / "model" / name).read_bytes() == (tmp_path / "alone" / name).read_bytes(), name
    assert torch.isfinite(next(model.parameters())).all()
