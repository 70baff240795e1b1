"""Made-up maps, and both workloads on them: what a bench, trials and estimates of memory run on."""

from __future__ import annotations

from typing import Any

import torch

from halfstep.data.loader import Batch, Samples
from halfstep.data.seeds import generator_for
from halfstep.models.radio_vae import RadioVAE
from halfstep.workloads.kind import Store
from halfstep.workloads.parts import FrozenPart
from halfstep.workloads.radio import build, build_vae
from halfstep.workloads.radio.config import RadioDiffConfig, RadioVaeConfig
from halfstep.workloads.radio.data import RadioData
from halfstep.workloads.radio.first_stage import sizes_of
from halfstep.workloads.workload import Workload

RadioConfig = RadioDiffConfig | RadioVaeConfig


def random_store(config: RadioConfig) -> dict[str, Any]:
    sizes = sizes_of(config.model.first_stage)
    return {"sizes": sizes, "scale_factor": 1.0, "image_size": config.data.image_size}


def random_batch(config: RadioConfig, store: Store) -> Batch:
    generator, size, side = generator_for(config.train.seed), config.train.batch_size, config.data.image_size
    shapes = {"gain": (size, 1, side, side), "condition": (size, 3, side, side)}
    drawn = {name: torch.randint(256, shape, dtype=torch.uint8, generator=generator) for name, shape in shapes.items()}
    return {**drawn, "index": torch.arange(size)}


def over(config: RadioConfig, store: Store, samples: Samples) -> Workload:
    """A first stage of random weights costs what a trained one does."""
    data = RadioData(train=samples, val=samples, about=(), notes=())  # type: ignore[arg-type]
    if isinstance(config, RadioVaeConfig):
        return build_vae.workload_of(config, build_vae.stage1(config), data)
    store = {**random_store(config), **store}
    vae = FrozenPart(module=RadioVAE(**store["sizes"]).eval())
    return build.workload_of(config, store, build.unet_of(config, store), vae, data)


def sample_size(config: RadioConfig) -> str:
    return f"{config.data.image_size} pixels"
