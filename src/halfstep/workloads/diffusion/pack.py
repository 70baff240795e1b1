"""`halfstep pack CONFIG.yaml`: the latents of a config's pictures, ahead of training."""

from __future__ import annotations

from halfstep.data.latent_cache import told_of_pack
from halfstep.data.pack_folder import PackingBar
from halfstep.errors import ConfigError, counted
from halfstep.workloads.diffusion.config import DiffusionConfig
from halfstep.workloads.diffusion.data import open_pictures
from halfstep.workloads.diffusion.latents import cache_path, opened_or_made
from halfstep.workloads.diffusion.networks import open_parts
from halfstep.workloads.diffusion.samples import vae_choice
from halfstep.workloads.vae_format import training_device


def pack(config: DiffusionConfig) -> dict[str, object]:
    """Encode every picture, unless that was done; what was made, for people and programs."""
    if config.data.cache != "latents":
        raise ConfigError(
            "data.cache is off in this config", why="there are no latents to pack", fix="data.cache=latents"
        )
    data = open_pictures(config.data, config.model.conditioning)
    parts = open_parts(config, data.classes)
    choice = vae_choice(config, data, parts)
    path = cache_path(config, data.root)
    with PackingBar(path) as bar:
        cache, is_new = opened_or_made(config, data, parts.vae, choice.name, training_device(config), bar)
    views = "with mirror images" if cache.moments.shape[1] > 1 else "without augmentation"
    text = f"latents of {counted(len(cache.moments), 'picture')}, {views}, encoded in {choice.name} ({choice.why})"
    return told_of_pack(cache, text, is_new=is_new, format=choice.name)
