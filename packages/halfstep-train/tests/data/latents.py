from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from halfstep_train.data.cache_file import open_cache
from halfstep_train.workloads.base.frozen_vae import LATENTS, open_or_write_latents


def replace_latents(path: Path) -> None:
    """Write other latents of the same images and VAE, as another version of a library might give them."""
    cache = open_cache(path, LATENTS)
    moments = torch.from_numpy(cache.map(np.float32, tuple(cache.index["shape"])) + 1)
    path.unlink()
    open_or_write_latents(path, cache.made_from, len(moments), lambda: iter([moments]))
