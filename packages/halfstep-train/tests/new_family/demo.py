"""Pictures of stripes: a demo's file, and what bench makes up."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

SIDE = 8
FILE = "pictures.npy"


def write_demo(folder: Path, *, seed: int) -> None:
    folder.mkdir(parents=True)
    generator = np.random.default_rng(seed)
    waves = np.sin(np.arange(SIDE) * generator.uniform(0.3, 2.0, (24, 1)))
    np.save(folder / FILE, (127.5 + 127.5 * waves[:, :, None] * np.ones(SIDE)).astype(np.uint8))


def random_store(config: Any) -> dict[str, Any]:
    return {"side": SIDE}


def random_batch(config: Any, store: Any) -> dict[str, Tensor]:
    size, side = config.train.batch_size, store["side"]
    return {"picture": torch.randint(256, (size, side, side), dtype=torch.uint8), "index": torch.arange(size)}
