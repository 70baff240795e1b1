"""What U-Net's presets change: settings, and the time and memory of a step at 512x512.

    python benchmarks/unet_presets.py                  counts memory tensor by tensor, no GPU needed
    python benchmarks/unet_presets.py --measure cuda   the guarded steps themselves, random data
    python benchmarks/unet_presets.py --measure cpu    the same in fp32, 128x128 and a quarter of the width: only the
                                                       ratios between presets say something then

Counted on torch's meta device: weights, gradients, optimizer, activations while they live; workspaces and the
allocator's gaps come on top. Measured: each preset as it runs, except that `train.fast: auto` stands for eager.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch

from halfstep.hardware.probe import probe
from halfstep_train.bench.problem import build_random_workload
from halfstep_train.config.schema import RunConfig
from halfstep_train.run.assemble import assemble, decide_plan
from halfstep_train.run.engine import Engine
from halfstep_train.run.memory.sizing import predict_step_cost
from halfstep_train.workloads import KINDS, load
from halfstep_train.workloads.segmentation.config import UNetConfig
from recording import store, time_steps

FULL = ["data.image_size=512"]
DATA = {"num_classes": 2, "channels": 3, "image_size": 512}


def counted(config: RunConfig) -> dict[str, Any]:
    cost = predict_step_cost(config, DATA, probe("cpu"), config.precision.default)
    return {"step_gb": cost.predict_bytes(config.train.batch_size) / 1e9}


def measured(config: RunConfig, device: torch.device) -> dict[str, Any]:
    assert isinstance(config, UNetConfig)
    torch.manual_seed(0)
    workload = build_random_workload(config)
    batch = KINDS.of(config.workload).synthetic.make_batch(config, workload.store)
    parts = assemble(config, workload, decide_plan(config, workload, probe(str(device))))
    engine = Engine(parts, parts.mode or "eager", lambda text, level: print(text))
    window = [{name: value.to(device) for name, value in batch.items()}] * config.train.accumulate
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    timed = time_steps(lambda: engine(window), warmup=6, steps=5, windows=4)
    samples = config.train.batch_size * config.train.accumulate
    peak = {"peak_memory_gb": torch.cuda.max_memory_allocated() / 1e9} if device.type == "cuda" else {}
    return {"mode": engine.mode, "measured": timed, "ms_a_sample": timed["ms"] / samples, **peak}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--measure", choices=("cuda", "cpu"))
    parser.add_argument("--out", help="folder for the JSON, default benchmarks/results")
    arguments = parser.parse_args()
    rows, on_cpu = {}, arguments.measure == "cpu"
    smaller = ["data.image_size=128", "model.base_channels=16", "precision=fp32", "device=cpu"]
    for name in ("lowmem", "quality", "stable", "debug", "fast"):
        config = load("unet", flags={"data_dir": "data", "preset": name}, overrides=smaller if on_cpu else FULL).config
        rows[name] = {
            "precision": config.precision.default,
            "batch_size": config.train.batch_size,
            "accumulate": config.train.accumulate,
            "fast": config.train.fast,
            "checkpointing": config.train.activation_checkpointing,
            **(measured(config, torch.device(arguments.measure)) if arguments.measure else counted(config)),
        }
        print(name, rows[name])
    name = f"unet_presets_{arguments.measure}" if arguments.measure else "unet_presets"
    store(name, {"rows": rows}, torch.device(arguments.measure or "cpu"), arguments.out)


if __name__ == "__main__":
    main()
