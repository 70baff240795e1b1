"""Export trained models as diffusers folders, which its pipelines open.

pixels, unconditional     DDPMPipeline
latents, unconditional    LDMPipeline (the VAE as its vqvae)
latents, text             StableDiffusionPipeline
others                    ToldPipeline (told_pipeline.py, copied next to the weights): needs trust_remote_code=True
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from halfstep.disk import write_atomically
from halfstep.workloads.base.latent_store import ENCODED_AT_ONCE
from halfstep.workloads.base.vae_trainer import VaeNet
from halfstep.workloads.diffusion.config import DiffusionConfig, VaeConfig
from halfstep.workloads.diffusion.data import make_square_samples, open_pictures
from halfstep.workloads.diffusion.diffusers_nets import CODEC, Net, build_net, dump_config, import_diffusers_class
from halfstep.workloads.diffusion.latents import pick_images
from halfstep.workloads.diffusion.make import make_scheduler_config
from halfstep.workloads.diffusion.networks import (
    ClassConditions,
    Conditions,
    DiffusionParts,
    TextConditions,
    open_parts,
    silence_transformers,
)
from halfstep.workloads.diffusion.noise_schedule import make_schedule

MEASURED_IMAGES = 512


def export(model: nn.Module, config: DiffusionConfig, store: Mapping[str, Any], folder: Path) -> None:
    """Export the U-Net with everything it needs to draw samples."""
    parts = open_parts(config, tuple(store["classes"]))
    shared = make_scheduler_config(make_schedule(config), config.model.target)
    with silence_transformers():
        _save_pipeline(folder, _copy_plain(model, store["unet"]), parts, shared)


def _save_pipeline(folder: Path, unet: Net, parts: DiffusionParts, shared: dict[str, Any]) -> None:
    clips, conditions = parts.vae is None, parts.conditions
    if clips and not conditions.is_told:
        scheduler = import_diffusers_class("DDPMScheduler")(**shared, clip_sample=True)
        import_diffusers_class("DDPMPipeline")(unet=unet, scheduler=scheduler).save_pretrained(folder)
        return
    # An offset of 1 is what Stable Diffusion's pipeline insists on; trailing timesteps do not read it.
    scheduler = import_diffusers_class("DDIMScheduler")(**shared, clip_sample=clips, steps_offset=1)
    # Neither pipeline for latents knows a VAE's shift.
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
        _save_own_pipeline(folder, {"unet": unet, "scheduler": scheduler, "vae": parts.vae}, conditions)


def _save_own_pipeline(folder: Path, nets: dict[str, Any], conditions: Conditions) -> None:
    """Save a custom pipeline, which diffusers does not have, with its code."""
    from halfstep.workloads.diffusion import told_pipeline

    if isinstance(conditions, TextConditions):
        nets |= {"text_encoder": conditions.encoder, "tokenizer": conditions.tokenizer}
    if isinstance(conditions, ClassConditions):
        nets["classes"] = conditions.names
    pipeline: Any = told_pipeline.ToldPipeline(**nets)
    pipeline.save_pretrained(folder)
    shutil.copy(Path(told_pipeline.__file__), folder / "pipeline.py")
    index = folder / "model_index.json"
    write_atomically(
        index, json.dumps(json.loads(index.read_text()) | {"_class_name": ["pipeline", "ToldPipeline"]}, indent=2)
    )


def export_vae(model: nn.Module, config: VaeConfig, store: Mapping[str, Any], folder: Path) -> None:
    """Export the VAE alone, with its latents' scale as measured on the training images."""
    assert isinstance(model, VaeNet)
    vae = _copy_plain(model.vae, store["vae"]).to(next(model.parameters()).device)
    vae.register_to_config(scaling_factor=measure_scale(vae, config))
    vae.to("cpu").save_pretrained(folder / "vae")


def measure_scale(vae: Net, config: VaeConfig) -> float:
    """Measure the latent scale on training images, encoded in fp32."""
    samples = make_square_samples(open_pictures(config.data).train, config.data.image_size)
    images = pick_images(samples, MEASURED_IMAGES)
    return CODEC.measure_scale(vae, images.split(ENCODED_AT_ONCE), source="this run")


def _copy_plain(net: Net, config: Mapping[str, Any]) -> Net:
    """Return a copy in fp32 on the CPU, without the changes that a run made to its modules."""
    plain = build_net(config)
    weights = {name: copy.deepcopy(tensor.detach()).float().cpu() for name, tensor in net.state_dict().items()}
    plain.load_state_dict(weights)
    assert dump_config(plain)["_class_name"] == config["_class_name"]
    return plain.eval()
