"""The workload of diffusion models, on pixels or latents of a frozen VAE, optionally conditioned on class or text.

`prepare` draws timesteps and noise and looks up their coefficients; `forward` encodes without gradients, adds noise in
fp32 and runs the U-Net; `loss` is the squared error, weighted by timestep.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from halfstep_train.data import noise
from halfstep_train.data.image_folder import check_same_classes
from halfstep_train.data.loader import Samples
from halfstep_train.data.seeds import make_generator
from halfstep_train.workloads.base.frozen_vae import LatentDraws
from halfstep_train.workloads.base.kind import Store
from halfstep_train.workloads.base.workload import Batch, Workload
from halfstep_train.workloads.diffusion import vae as autoencoder
from halfstep_train.workloads.diffusion.config import DiffusionConfig, VaeConfig
from halfstep_train.workloads.diffusion.data import open_diffusion_data, scale_images
from halfstep_train.workloads.diffusion.diffusers_blocks import find_blocks
from halfstep_train.workloads.diffusion.diffusers_nets import CODEC, Net, dump_config
from halfstep_train.workloads.diffusion.latents import describe_truncated_captions, open_samples
from halfstep_train.workloads.diffusion.networks import (
    AdoptedSettings,
    DiffusionParts,
    adopt_settings,
    build_unet,
    list_frozen_parts,
    open_parts,
    open_text,
)
from halfstep_train.workloads.diffusion.noise_schedule import NoiseDraws, add_noise, make_target
from halfstep_train.workloads.diffusion.sampling import ImageSampler, check_steps
from halfstep_train.workloads.diffusion.scores import DenoisingMetrics, denoising_loss

FRAGILE = (
    "noising: in a half format no noise would be added at the first timesteps",
    "vae.posterior: exp of log-variances up to 20",
    "loss.mse: squares of small differences",
)


def build(config: DiffusionConfig, store: Mapping[str, Any] | None = None) -> Workload:
    """Build the workload for `config.data.dir`; the `store` of an earlier run fixes classes and the config of the
    U-Net."""
    adopted = adopt_settings(config) if store is None else AdoptedSettings(config=config)
    config = adopted.config
    check_steps(config.sample.steps, config)
    data = open_diffusion_data(config.data, config.model.conditioning)
    classes = tuple(store["classes"]) if store else data.classes
    check_same_classes(classes, data.classes)
    parts = open_parts(config, classes)
    model = build_unet(config, parts, store)
    samples = open_samples(config, data, parts, store)
    found = {"unet": dump_config(model), "classes": list(classes), **samples.store}
    return make_workload(
        config,
        parts,
        model,
        samples.train,
        samples.val,
        found,
        with_vae=config.data.cache == "off",
        notes=(*data.notes, *adopted.notes, *describe_truncated_captions(data, parts.conditions)),
        val_names=data.val_names,
        about=(*data.about, *adopted.about, *samples.about, *describe_conditions(config, parts)),
        settled={**adopted.settled, **samples.settled},
    )


def describe_conditions(config: DiffusionConfig, parts: DiffusionParts) -> tuple[tuple[str, str], ...]:
    """Return a line about the U-Net's conditions for the run's header."""
    if not parts.conditions.is_conditional:
        return ()
    return (("condition", f"{parts.conditions.about}; {config.model.drop_condition:.0%} of samples train without it"),)


def make_workload(
    config: DiffusionConfig,
    parts: DiffusionParts,
    model: Net,
    train: Samples,
    val: Samples,
    store: Mapping[str, Any],
    *,
    with_vae: bool = True,
    **about: Any,
) -> Workload:
    """Build the workload from its networks and samples."""
    return Workload(
        name=config.workload,
        model=model,
        train_samples=train,
        val_samples=val,
        prepare=DiffusionPrepare(config, parts),
        forward=DiffusionForward(config, parts),
        loss=denoising_loss,
        metrics=partial(DenoisingMetrics, config.noise.steps),
        metric="mse",
        mode="min",
        scoring="mse: unweighted, over all held-out samples; mse/A-B: timesteps A to B. Each sample has fixed noise",
        fragile=FRAGILE,
        blocks=find_blocks(model),
        store=store,
        frozen=list_frozen_parts(config, parts, with_vae=with_vae),
        sample=ImageSampler(config, parts, store).draw_sheet,
        scores_raw=True,
        **about,
    )


class DiffusionPrepare:
    """Convert a loaded batch to images in fp32, draw timesteps and noise, and drop some conditions."""

    def __init__(self, config: DiffusionConfig, parts: DiffusionParts) -> None:
        self.flip, self.drop = config.data.flip, config.model.drop_condition
        self.noising, self.conditions = NoiseDraws(config, parts.shape), parts.conditions
        self.shape, self.has_latents = parts.shape, parts.vae is not None

    def __call__(self, batch: Batch, *, key: tuple[int, ...], training: bool) -> Batch:
        first = next(iter(batch.values()))
        num, device = len(first), first.device
        made = dict(batch)
        # Cached latents come with their flips and need no pixels.
        if "moments" not in batch:
            made["image"] = scale_images(batch, key=key, flip=self.flip if training else 0.0)
        if self.has_latents:
            made["posterior_noise"] = noise.normal(key, num, self.shape, device, stream="posterior")
        # Validation spreads its timesteps evenly over all noise levels, by the index of the sample.
        made |= self.noising.draw(num, key=key, device=device, index=None if training else batch.get("index"))
        return made | (self.conditions.drop(batch, key=key, share=self.drop) if training else {})


class DiffusionForward:
    """Add noise to images or latents, run the U-Net, and return its prediction with the target."""

    def __init__(self, config: DiffusionConfig, parts: DiffusionParts) -> None:
        self.target, self.parts, self.conditions = config.model.target, parts, parts.conditions
        self.draw_latents: LatentDraws | None = None
        if parts.vae is not None:
            form = parts.vae.config
            self.draw_latents = LatentDraws(
                parts.vae, CODEC, scale=float(form.scaling_factor), shift=float(form.shift_factor or 0.0)
            )

    def __call__(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        x0 = batch["image"] if self.draw_latents is None else self.draw_latents(batch)
        signal, sigma = batch["signal"], batch["sigma"]
        x_t = add_noise(x0, batch["noise"], signal, sigma)
        keywords = self.conditions.make_keywords(batch)
        return {
            "prediction": model(x_t, batch["timestep"], **keywords, return_dict=False)[0],
            "target": make_target(self.target, x0, batch["noise"], signal, sigma),
        }


NUM_CLASSES = 10


def make_random_store(config: DiffusionConfig | VaeConfig) -> dict[str, Any]:
    return {"classes": [str(k) for k in range(NUM_CLASSES)]}


def make_random_batch(config: DiffusionConfig | VaeConfig, store: Store) -> Batch:
    """Return random bytes as the loader returns them, and random tokens if the model is conditioned on text."""
    generator, size, side = make_generator(config.train.seed), config.train.batch_size, config.data.image_size
    image = torch.randint(256, (size, side, side, 3), dtype=torch.uint8, generator=generator)
    label = torch.randint(NUM_CLASSES, (size,), generator=generator)
    batch = {"image": image, "label": label, "index": torch.arange(size)}
    if isinstance(config, DiffusionConfig) and config.model.text_encoder:
        # Only its sizes are needed; on meta nothing is allocated.
        with torch.device("meta"):
            text = open_text(config.model.text_encoder)
        vocabulary = int(text.encoder.config.vocab_size)
        batch["tokens"] = torch.randint(vocabulary, (size, text.length), generator=generator)
    return batch


def build_vae_on_samples(config: VaeConfig, store: Store, samples: Samples) -> Workload:
    """Build the workload of a VAE on given samples."""
    return autoencoder.make_workload(config, autoencoder.build_model(config), samples, samples, store)


def build_on_samples(config: DiffusionConfig, store: Store, samples: Samples) -> Workload:
    """Build the workload of a diffusion model on given samples."""
    parts = open_parts(config, tuple(store["classes"]))
    return make_workload(config, parts, build_unet(config, parts), samples, samples, store)
