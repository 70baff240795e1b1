"""Diffusion: models that make pictures, and the VAE whose latents they may work on. On diffusers' networks."""

from halfstep.workloads.diffusion.config import DiffusionConfig, VaeConfig
from halfstep.workloads.kind import Kind

_HERE = "halfstep.workloads.diffusion"

DIFFUSION = Kind(
    builder=f"{_HERE}.build:build",
    config=DiffusionConfig,
    demo=f"{_HERE}.demo:write_demo",
    random_store=f"{_HERE}.random_data:random_store",
    random_batch=f"{_HERE}.random_data:random_batch",
    over=f"{_HERE}.random_data:over",
    task="diffusion",
    about="make pictures: any folder of them",
    models={"diffusion": "114 M parameters at its defaults"},
)

VAE = Kind(
    builder=f"{_HERE}.vae:build",
    config=VaeConfig,
    demo=f"{_HERE}.demo:write_demo",
    random_store=f"{_HERE}.random_data:random_store",
    random_batch=f"{_HERE}.random_data:random_batch",
    over=f"{_HERE}.random_data:vae_over",
    task="autoencoder",
    about="latents for a diffusion model: any folder of pictures",
    models={"vae": "84 M parameters at its defaults"},
)
