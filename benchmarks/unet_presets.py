"""What U-Net's presets change: settings, and the memory of a step at full size, counted tensor by tensor.

    python benchmarks/unet_presets.py

Counted on torch's meta device at 512x512 (no GPU needed): weights, gradients, optimizer, activations while they live.
Workspaces and the allocator's gaps come on top; on an H200 the guarded bf16 step at batch 8 peaked at 6.7 GB.
"""

from __future__ import annotations

import torch
from recording import store

from halfstep.config.load import load
from halfstep.run.guide_memory import step_cost

DATA = {"num_classes": 2, "channels": 3, "image_size": 512}


def main() -> None:
    rows = {}
    for name in ("fast", "quality", "lowmem", "stable", "debug"):
        config = load("unet", preset=name, flags={"data_dir": "data"}).config
        cost = step_cost(config, DATA, config.precision.default)
        average = 4 * cost.num_parameters if config.ema.enabled else 0
        rows[name] = {
            "precision": config.precision.default,
            "batch_size": config.train.batch_size,
            "accumulate": config.train.accumulate,
            "fast": config.train.fast,
            "checkpointing": config.train.activation_checkpointing,
            "step_gb": (cost.bytes_at(config.train.batch_size) + average) / 1e9,
        }
        print(name, rows[name])
    store("unet_presets", {"rows": rows}, torch.device("cpu"))


if __name__ == "__main__":
    main()
