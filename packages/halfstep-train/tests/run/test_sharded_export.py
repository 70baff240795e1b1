"""A sharded run exports the files of an unsharded one, byte for byte, and no rank holds the whole model for it."""

from __future__ import annotations

import ctypes
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import diffusion_tiny
import tiny_radio
from halfstep.distributed.world import World
from halfstep_train.run.checkpoint import Checkpoint, Checkpoints, is_sharded, load, open_weights
from halfstep_train.run.folder import RunFolder
from halfstep_train.run.launch import Launch
from halfstep_train.run.train import train
from halfstep_train.workloads import KINDS
from halfstep_train.workloads import load as load_config
from halfstep_train.workloads.base.kind import load_part
from halfstep_train.workloads.language.gpt2 import build_gpt2, get_size
from halfstep_train.workloads.language.gpt2_weights import save_gpt2
from ranks_together import free_port, together

pytestmark = pytest.mark.ranks

SHARD = {
    "train.max_steps": 2, "train.shard": True, "train.rank_timeout_s": 60, "ema.enabled": True, "train.batch_size": 4,
    "log.quiet": True, "device": "cpu", "precision.default": "fp32", "data.num_workers": 0,
}  # fmt: skip
FAMILIES: dict[str, tuple[dict[str, Any], str]] = {
    "gpt2": (
        {"data.tokenizer": "characters", "model.depth": 2, "model.heads": 2, "model.dim": 16, "model.context": 8},
        "model.safetensors",
    ),
    "diffusion": (
        {**diffusion_tiny.TINY, **diffusion_tiny.DIFFUSION}, "unet/diffusion_pytorch_model.safetensors"
    ),
    "vae": (diffusion_tiny.TINY, "vae/diffusion_pytorch_model.safetensors"),
    "radiodiff_vae": (tiny_radio.VAE, "vae.safetensors"),
}  # fmt: skip
"""Settings and the file of the weights. Families without an export of their own: test_sharded_runs.py."""


def write_data(folder: Path) -> dict[str, str]:
    diffusion_tiny.pictures(folder / "pictures")
    tiny_radio.write_tiny_demo(folder / "maps")
    (folder / "text").mkdir()
    (folder / "text" / "text.txt").write_text("to be or not to be, that is the question. " * 40)
    names = {"gpt2": "text", "radiodiff_vae": "maps"}
    return {family: str(folder / names.get(family, "pictures")) for family in FAMILIES}


def train_all(rank: int, size: int, port: int, ports: list[int], folder: Path, data: dict[str, str]) -> None:
    for own_port, (family, (settings, _)) in zip(ports, FAMILIES.items(), strict=True):
        launch = Launch(rank=rank, size=size, local_rank=rank, address="127.0.0.1", port=own_port, by_torchrun=False)
        values = {**settings, **SHARD, "data.dir": data[family]}
        overrides = [f"{key}={json.dumps(value)}" for key, value in values.items()]
        train(load_config(family, overrides=overrides), out=folder / family, launch=launch)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exports")
    together(2, train_all, folder / "ends", [free_port() for _ in FAMILIES], folder, write_data(folder))
    return folder


@pytest.mark.parametrize("family", FAMILIES)
def test_two_ranks_write_the_files_of_one(runs: Path, tmp_path: Path, family: str) -> None:
    run, file = runs / family, FAMILIES[family][1]
    assert RunFolder.open(str(run)).read_plan().shard_blocks, "it has no repeated blocks"
    path = find_exported(run)
    assert is_sharded(path)
    checkpoint = load(path)
    # The same weights, as an unsharded run stores and exports them.
    alone, config = Checkpoints(tmp_path / "alone").save(2, checkpoint), load_config(str(run / "config.yaml")).config
    (tmp_path / "model").mkdir()
    export = load_part(KINDS.of(family).export or "")
    export(open_weights(alone), config, dict(checkpoint.state["store"]), tmp_path / "model", torch.device("cpu"))
    names = sorted(str(one.relative_to(tmp_path / "model")) for one in (tmp_path / "model").rglob("*"))
    assert file in names
    assert sorted(str(one.relative_to(run / "model")) for one in (run / "model").rglob("*")) == names
    for name in names:
        if (run / "model" / name).is_file():
            assert (run / "model" / name).read_bytes() == (tmp_path / "model" / name).read_bytes(), name


def find_exported(run: Path) -> Path:
    checkpoints = Checkpoints(run / "checkpoints")
    return checkpoints.find_best() or checkpoints.list_all()[-1]


# --- host memory ---

SIZES = {"depth": 12, "heads": 2, "dim": 384, "context": 8, "vocab": 64}
LARGEST_BYTES = 4 * 384 * 4 * 384
"""Of GPT-2's tensors: the first layer of an MLP."""
M_MMAP_THRESHOLD = -3
"""glibc's number of that option."""


def save_shards(rank: int, size: int, port: int, folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    model = fully_shard(build_gpt2("gpt2", **SIZES))
    checkpoints = Checkpoints(folder, world=World(limit_s=60))
    checkpoints.save(1, Checkpoint(model=dict(model.state_dict()), ema={}, state={}))
    checkpoints.wait()
    dist.destroy_process_group()


def measure_export(rank: int, size: int, port: int, shards: Path, folder: Path) -> int:
    """Return by how much the memory of a new process grows while it exports: one that freed a model would reuse it."""
    tiny = build_gpt2("gpt2", depth=1, heads=2, dim=16, context=8, vocab=64)
    save_gpt2(tiny.state_dict(), tiny.size, folder)  # torch imports and allocates for its first operations
    open_weights(shards)
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**16)  # freed tensors leave the heap
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts here
    before = read_status("VmRSS")
    save_gpt2(open_weights(shards), get_size("gpt2", **SIZES), folder)
    return read_status("VmHWM") - before


def read_status(key: str) -> int:
    found = re.search(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return 1024 * int(found[1])


def test_an_export_holds_a_few_tensors_not_the_model(tmp_path: Path) -> None:
    together(2, save_shards, tmp_path / "found", tmp_path / "checkpoints")
    [path] = (tmp_path / "checkpoints").glob("step-*")
    [grown] = together(1, measure_export, tmp_path / "grown", path, tmp_path / "model")
    whole = (tmp_path / "model" / "model.safetensors").stat().st_size
    assert whole > 30 * LARGEST_BYTES
    # A tensor and the piece that is copied into it, or its transposed copy: 2.0 were measured.
    assert grown < 3 * LARGEST_BYTES, f"{grown / 1e6:.0f} MB, the model has {whole / 1e6:.0f} MB"
