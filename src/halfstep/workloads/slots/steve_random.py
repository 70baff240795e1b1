"""Made-up clips: what a bench, trials and estimates of memory run on."""

from __future__ import annotations

from typing import Any

import torch

from halfstep.data.loader import Batch
from halfstep.data.seeds import generator_for
from halfstep.workloads.kind import Store
from halfstep.workloads.slots.steve_config import SteveConfig


def random_store(config: SteveConfig) -> dict[str, Any]:
    return {"image_size": config.data.image_size}


def random_batch(config: SteveConfig, store: Store) -> Batch:
    """Bytes as a loader delivers them."""
    shape = (config.train.batch_size, config.data.chunk_size, 3, *[config.data.image_size] * 2)
    video = torch.randint(256, shape, dtype=torch.uint8, generator=generator_for(config.train.seed))
    return {"video": video, "index": torch.arange(len(video))}
