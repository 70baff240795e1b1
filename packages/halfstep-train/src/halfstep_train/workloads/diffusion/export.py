"""Export trained models as folders that diffusers' pipelines open.

pixels, unconditional     DDPMPipeline
latents, unconditional    LDMPipeline (the VAE as its vqvae)
latents, text             StableDiffusionPipeline
others                    ConditionalPipeline (conditional_pipeline.py, copied to the folder; trust_remote_code=True)
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from halfstep.disk import write_atomically
from halfstep.tensor_files import LazyTensors, take, write_tensors
from halfstep_train.models.weights import stream_weights
from halfstep_train.workloads.base.frozen_vae import ENCODED_AT_ONCE
from halfstep_train.workloads.base.kind import Store
from halfstep_train.workloads.diffusion.config import DiffusionConfig, VaeConfig
from halfstep_train.workloads.diffusion.data import make_square_samples, open_diffusion_data
from halfstep_train.workloads.diffusion.diffusers_nets import CODEC, Net, build_net, import_diffusers_class
from halfstep_train.workloads.diffusion.latents import pick_images
from halfstep_train.workloads.diffusion.networks import (
    ClassConditions,
    Conditions,
    DiffusionParts,
    TextConditions,
    open_parts,
    silence_transformers,
)
from halfstep_train.workloads.diffusion.noise_schedule import make_scheduler_config

WEIGHTS_NAME = "diffusion_pytorch_model.safetensors"
MEASURED_IMAGES = 512
"""Training images on which the scale of the latents is measured."""


def export(weights: LazyTensors, config: DiffusionConfig, store: Store, folder: Path, device: torch.device) -> None:
    """Export the U-Net as a pipeline with everything that sampling needs."""
    parts = open_parts(config, tuple(store["classes"]))
    shared = make_scheduler_config(config.noise, config.model.target)
    with silence_transformers():
        _save_pipeline(folder, _make_bare_net(store["unet"], weights), parts, shared)


def _save_pipeline(folder: Path, unet: Net, parts: DiffusionParts, shared: dict[str, Any]) -> None:
    """Save the pipeline class that fits the model (see the table above)."""
    clips, conditions = parts.vae is None, parts.conditions
    if clips and not conditions.is_conditional:
        scheduler = import_diffusers_class("DDPMScheduler")(**shared, clip_sample=True)
        import_diffusers_class("DDPMPipeline")(unet=unet, scheduler=scheduler).save_pretrained(folder)
        return
    # StableDiffusionPipeline requires steps_offset=1; trailing timesteps do not use it.
    scheduler = import_diffusers_class("DDIMScheduler")(**shared, clip_sample=clips, steps_offset=1)
    # diffusers' pipelines for latents do not support the shift of a VAE.
    is_plain = parts.vae is not None and not parts.vae.config.shift_factor
    if is_plain and type(conditions) is Conditions:
        import_diffusers_class("LDMPipeline")(vqvae=parts.vae, unet=unet, scheduler=scheduler).save_pretrained(folder)
    elif is_plain and isinstance(conditions, TextConditions):
        import_diffusers_class("StableDiffusionPipeline")(
            vae=parts.vae,
            text_encoder=conditions.encoder,
            tokenizer=conditions.tokenizer,
            unet=unet,
            scheduler=scheduler,
            safety_checker=None,
            feature_extractor=None,
            requires_safety_checker=False,
        ).save_pretrained(folder)
    else:
        _save_custom_pipeline(folder, {"unet": unet, "scheduler": scheduler, "vae": parts.vae}, conditions)


def _save_custom_pipeline(folder: Path, nets: dict[str, Any], conditions: Conditions) -> None:
    """Save a pipeline of our class, together with its code."""
    from halfstep_train.workloads.diffusion import conditional_pipeline

    if isinstance(conditions, TextConditions):
        nets |= {"text_encoder": conditions.encoder, "tokenizer": conditions.tokenizer}
    if isinstance(conditions, ClassConditions):
        nets["classes"] = conditions.names
    pipeline: Any = conditional_pipeline.ConditionalPipeline(**nets)
    pipeline.save_pretrained(folder)
    shutil.copy(Path(conditional_pipeline.__file__), folder / "pipeline.py")
    index = folder / "model_index.json"
    write_atomically(
        index,
        json.dumps(json.loads(index.read_text()) | {"_class_name": ["pipeline", "ConditionalPipeline"]}, indent=2),
    )


def export_vae(weights: LazyTensors, config: VaeConfig, store: Store, folder: Path, device: torch.device) -> None:
    """Export the VAE, with the scale of its latents on training images."""
    weights = take(weights, "vae.", torch.float32)
    vae = _make_bare_net(store["vae"], weights)
    with stream_weights(vae, weights, device):
        scale = measure_scale(vae, config, device)
    vae.register_to_config(scaling_factor=scale)
    vae.save_pretrained(folder / "vae")


def measure_scale(vae: Net, config: VaeConfig, device: torch.device) -> float:
    """Return 1 / standard deviation of the latents of training images, encoded in fp32."""
    samples = make_square_samples(open_diffusion_data(config.data).train, config.data.image_size)
    images = pick_images(samples, MEASURED_IMAGES)
    return CODEC.measure_scale(vae, (some.to(device) for some in images.split(ENCODED_AT_ONCE)), source="this run")


def _make_bare_net(config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> Net:
    """Return a network without weights. Its `save_pretrained`, which pipelines call too, writes these in fp32, one
    tensor at a time."""
    with torch.device("meta"):
        net = build_net(config).eval()
    assert net.state_dict().keys() == weights.keys()

    def save_pretrained(folder: str | Path, **options: Any) -> None:
        net.save_config(folder)
        write_tensors(Path(folder) / WEIGHTS_NAME, take(weights, dtype=torch.float32), {"format": "pt"})

    net.save_pretrained = save_pretrained
    return net
