"""Made-up pictures, and the workloads on them: what a bench, trials and estimates of memory run on."""

from __future__ import annotations

from typing import Any

import torch

from halfstep.data.loader import Batch, Samples
from halfstep.data.seeds import generator_for
from halfstep.workloads.diffusion import vae as autoencoder
from halfstep.workloads.diffusion.build import workload_of
from halfstep.workloads.diffusion.config import DiffusionConfig, VaeConfig
from halfstep.workloads.diffusion.networks import model_of, open_parts
from halfstep.workloads.kind import Store
from halfstep.workloads.workload import Workload

NUM_CLASSES, NUM_TOKENS = 10, 77


def random_store(config: DiffusionConfig | VaeConfig) -> dict[str, Any]:
    return {"classes": [str(k) for k in range(NUM_CLASSES)]}


def random_batch(config: DiffusionConfig | VaeConfig, store: Store) -> Batch:
    """Bytes as a loader delivers them; with text, tokens."""
    generator, size, side = generator_for(config.train.seed), config.train.batch_size, config.data.image_size
    image = torch.randint(256, (size, side, side, 3), dtype=torch.uint8, generator=generator)
    label = torch.randint(NUM_CLASSES, (size,), generator=generator)
    batch = {"image": image, "label": label, "index": torch.arange(size)}
    if isinstance(config, DiffusionConfig) and config.model.conditioning == "text":
        batch["tokens"] = torch.randint(100, (size, NUM_TOKENS), generator=generator)
    return batch


def vae_over(config: VaeConfig, store: Store, samples: Samples) -> Workload:
    return autoencoder.workload_of(config, autoencoder.model_of(config), samples, samples, store)


def over(config: DiffusionConfig, store: Store, samples: Samples) -> Workload:
    parts = open_parts(config, tuple(store["classes"]))
    return workload_of(config, parts, model_of(config, parts), samples, samples, store)
