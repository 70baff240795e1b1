"""A few steps of a model whose blocks are gathered in bf16, on CUDA by NCCL or on a CPU by gloo."""

from __future__ import annotations

import dataclasses
import json
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from halfstep.distributed.sharding import get_local
from halfstep.distributed.world import World
from halfstep.hardware.gpus import look_up_gpu
from halfstep.hardware.probe import probe
from halfstep.step.randomness import seed_everything
from halfstep_train.run.assemble import Assembly, assemble, build_workload, decide_plan
from halfstep_train.run.engine import make_engine
from halfstep_train.tune.modes import Mode
from halfstep_train.tune.trials import load_first_batch
from halfstep_train.workloads import load
from whole_runs import TINY

DEPTH = 10  # two blocks are one unit
FP32 = {"blocks.1.second": "fp32", "blocks.5": "fp32"}
SETTINGS = {**TINY, "precision.default": "bf16", "precision.modules": FP32, "ema.enabled": True,
            "train.shard": True, "train.shard_gather": "bf16", "model.options": {"depth": DEPTH},
            "schedule.warmup_steps": 0, "optimizer.lr": 1e-2}  # fmt: skip


def train_gathered_in_half(rank: int, size: int, port: int, where: str, mode: Mode) -> dict[str, Any]:
    """Six steps, of which the fourth is NaN on the last rank."""
    device = torch.device(where)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    meeting = f"tcp://127.0.0.1:{port}"
    dist.init_process_group(backend, meeting, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    overrides = [f"{key}={json.dumps(value)}" for key, value in {**SETTINGS, "device": device.type}.items()]
    config = load("sharded_workload:build", overrides=overrides).config
    seed_everything(0)
    workload = build_workload(config)
    plan = decide_plan(config, workload, probe(where) if device.type == "cuda" else look_up_gpu("H100"))
    blocks = tuple(f"blocks.{index}" for index in range(DEPTH))
    plan = dataclasses.replace(plan, device=where, mode=mode, shards=True, shard_blocks=blocks)
    parts = assemble(config, workload, plan, World())
    formats: dict[str, str] = {}
    for name, module in parts.model.named_modules() if mode == "eager" else ():
        if getattr(module, "weight", None) is not None:
            # After FSDP2's own hook, which gathers the weight.
            module.register_forward_pre_hook(
                lambda module, inputs, name=name: formats.update({name: str(module.weight.dtype)})
            )
    remarks: list[str] = []
    engine = make_engine(parts, mode, lambda text, level: remarks.append(text))
    batch = {name: value.to(device) for name, value in load_first_batch(config.train, workload).items()}
    poisoned = {**batch, "image": batch["image"] * (float("nan") if rank == size - 1 else 1.0)}
    found: dict[str, Any] = {"losses": [], "formats": formats, "remarks": remarks}
    for number in range(6):
        before = copy_state(parts)
        reading: Any = engine([poisoned if number == 3 else batch]).read()
        if number == 3:
            after = copy_state(parts)
            found["reason"], found["num"] = reading.reason, len(before)
            found["changed"] = [name for name in before if not torch.equal(before[name], after[name])]
        else:
            found["losses"].append(reading.loss)
    found["stored"] = {str(p.dtype) for p in parts.model.parameters()}
    dist.destroy_process_group()
    return found


def copy_state(parts: Assembly) -> dict[str, Tensor]:
    """This rank's weights, buffers, average and optimizer state."""
    found = dict(parts.model.state_dict())
    found |= {f"average {index}": shadow for index, shadow in enumerate(parts.step.ema.shadows)}
    for index, state in enumerate(parts.step.optimizers[0].state.values()):
        found |= {f"{name} {index}": value for name, value in state.items() if isinstance(value, Tensor)}
    return {name: get_local(tensor).detach().clone() for name, tensor in found.items()}


def check_half_gather(own: dict[str, Any]) -> None:
    assert own["stored"] == {"torch.float32"}
    assert own["losses"][-1] < own["losses"][0]
    assert own["num"] > 100
    assert own["changed"] == []
    in_fp32 = {name for name, dtype in own["formats"].items() if dtype == "torch.float32"}
    norms = {f"blocks.{index}.norm" for index in range(DEPTH)}
    assert own["formats"] == {} or in_fp32 == {
        "stem",
        "head",
        "blocks.1.second",
        "blocks.5.first",
        "blocks.5.second",
        *norms,
    }
    assert own["formats"] == {} or own["formats"]["blocks.0.first"] == "torch.bfloat16"
