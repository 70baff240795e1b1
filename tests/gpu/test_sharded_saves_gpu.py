"""A sharded model on a GPU, a world of one with NCCL: saved while it trains, and resumed bit-exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import halfstep as hs
from halfstep.step.optim.adamw8bit import AdamW8bit
from ranks_together import together

pytestmark = pytest.mark.gpu


def make(optimizer: str) -> tuple[nn.Module, hs.Step]:
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.BatchNorm1d(1024), nn.Linear(1024, 256)).cuda()
    fully_shard(model[0])
    fully_shard(model)
    kind: Any = {"adamw": torch.optim.AdamW, "8bit": AdamW8bit}[optimizer]
    made = kind(model.parameters(), lr=1e-3, **({"fused": True} if optimizer == "adamw" else {}))
    return model, hs.Step(model, made, "bf16", ema_decay=0.9, clip_norm=1.0, fast="off")


def train(model: nn.Module, step: hs.Step, path: Path | None, num: int) -> None:
    while step.attempted < num:
        x = torch.randn(64, 256, generator=torch.Generator().manual_seed(step.attempted)).cuda()
        step(lambda x: (model(x) - x).square().mean(), [x])
        if path is not None and step.attempted == 3:
            hs.save(path, step, model)


def take(model: nn.Module, step: hs.Step) -> list[Tensor]:
    found = [*model.state_dict().values(), *step.ema.state_dict().values()]
    return [getattr(tensor, "_local_tensor", tensor).detach().clone() for tensor in found]


def save_and_resume(rank: int, size: int, port: int, folder: Path, backend: str) -> dict[str, bool]:
    torch.cuda.set_device(0)
    torch.use_deterministic_algorithms(True)
    dist.init_process_group(backend, f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    found = {}
    for name in ("adamw", "8bit"):
        model, step = make(name)
        train(model, step, folder / name, 6)
        straight = take(model, step)
        step.finish()
        model, step = make(name)
        hs.load(folder / name, step, model)
        found[f"{name} on the GPU"] = all(t.is_cuda for t in take(model, step) if t.is_floating_point())
        train(model, step, None, 6)
        found[name] = all(map(torch.equal, straight, take(model, step)))
        hs.save_weights(folder / f"{name}.safetensors", model)
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize("backend", ["nccl", "cpu:gloo,cuda:nccl"])
@pytest.mark.filterwarnings("ignore:.*holds no position in the data")
def test_a_sharded_loop_on_a_gpu_resumes_bit_exactly(backend: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    [found] = together(1, save_and_resume, tmp_path / "found", tmp_path, backend)
    assert all(found.values()), found
