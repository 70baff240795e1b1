"""The workload of diffusion models, on pixels or latents of a frozen VAE, optionally conditioned on class or text.

`prepare` draws timesteps and noise and looks up their coefficients; `forward` encodes without gradients, adds noise in
fp32 and runs the U-Net; `loss` is the squared error, weighted by timestep.
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from halfstep.disk import write_atomically
from halfstep.errors import ConfigError
from halfstep.tensor_files import LazyTensors, take
from halfstep_train.data import noise
from halfstep_train.data.image_folder import check_same_classes
from halfstep_train.data.loader import Samples, make_generator
from halfstep_train.workloads.base.frozen_vae import ENCODED_AT_ONCE, LatentDraws, use_format
from halfstep_train.workloads.base.kind import Store
from halfstep_train.workloads.base.sheets import Array, arrange_grid
from halfstep_train.workloads.base.using import Guiding, measure_median_size, read_size
from halfstep_train.workloads.base.workload import Batch, OpenedData, Workload
from halfstep_train.workloads.diffusion import vae as autoencoder
from halfstep_train.workloads.diffusion.config import DiffusionConfig, VaeConfig
from halfstep_train.workloads.diffusion.data import make_square_samples, open_diffusion_data, scale_images, to_bytes
from halfstep_train.workloads.diffusion.diffusers_blocks import find_blocks
from halfstep_train.workloads.diffusion.diffusers_nets import (
    CODEC,
    Net,
    build_net,
    decode_scaled,
    dump_config,
    import_diffusers_class,
)
from halfstep_train.workloads.diffusion.networks import (
    ClassConditions,
    Conditions,
    DiffusionParts,
    TextConditions,
    adopt_settings,
    build_unet,
    list_frozen_parts,
    open_parts,
    open_samples,
    open_text,
    pick_images,
    silence_transformers,
)
from halfstep_train.workloads.diffusion.noise_schedule import NoiseDraws, add_noise, make_scheduler_config, make_target
from halfstep_train.workloads.diffusion.scores import DenoisingMetrics, denoising_loss

# --- samplers ---
#
# Both samplers are deterministic and the initial noise is keyed by sample, so a sample is the same in a batch of any
# size. States are fp32; only the network runs in the plan's format.


PATH_IMAGES, PATH_STATES = 4, 8
"""Samples, and intermediate states of each, in a picture of the sampling path."""
DECODED_AT_ONCE = 8
"""Latents per call of the VAE."""


class ImageSampler:
    """Samples images with a U-Net, its conditions and its VAE."""

    def __init__(self, config: DiffusionConfig, parts: DiffusionParts, store: Mapping[str, Any]) -> None:
        self.config, self.parts = config, parts
        self._form = str(store.get("vae_format", ""))
        """Format of a VAE that is not a frozen module because latents are cached; it is moved to the device only to
        decode."""

    def make_images(
        self, model: nn.Module, key: tuple[int, ...], num: int, *, conditions: Batch | None = None, kept: int = 0
    ) -> tuple[Tensor, list[Tensor]]:
        """Return images as bytes (N, H, W, 3), and `kept` intermediate states.

        By default samples cycle through the classes, and captions are empty.
        """
        settings, device = self.config.sample, next(model.parameters()).device
        check_steps(settings.steps, self.config)
        start = noise.normal(key, num, self.parts.shape, device, stream="start")
        # Pixels are in -1..1; latents have no such limits.
        scheduler = make_scheduler(self.config, clips=self.parts.vae is None)
        given = conditions or self._make_default_conditions(num, device)
        denoise = make_guided_denoiser(model, self.parts.conditions, given, settings.guidance)
        found, path = run_sampler(denoise, scheduler, start, settings.steps, kept)
        return self._decode_to_bytes(found), [self._decode_to_bytes(state[:PATH_IMAGES]) for state in path]

    def draw_sheet(self, model: nn.Module, key: tuple[int, ...]) -> dict[str, Array]:
        """Draw a grid of samples, and the paths of a few from noise to image."""
        found, path = self.make_images(model, key, self.config.sample.num, kept=PATH_STATES)
        return {
            "samples": arrange_grid(found.numpy()),
            "path": draw_path([state.numpy() for state in (*path, found[:PATH_IMAGES])]),
        }

    def decode_means(self, means: Tensor) -> Tensor:
        """Decode the means of cached latents to image bytes."""
        vae = self.parts.vae
        assert vae is not None
        return self._decode_to_bytes((means.float() - (vae.config.shift_factor or 0.0)) * vae.config.scaling_factor)

    def _make_default_conditions(self, num: int, device: torch.device) -> Batch:
        batch = self.parts.conditions.make_empty(num, device)
        if "label" in batch:
            batch["label"] = torch.arange(num, device=device) % (self.parts.conditions.num_classes - 1)
        return batch

    def _decode_to_bytes(self, samples: Tensor) -> Tensor:
        if self.parts.vae is None:
            return to_bytes(samples)
        vae = self.parts.vae.to(samples.device)
        with torch.no_grad(), use_format(self._form, samples.device):
            images = to_bytes(torch.cat([decode_scaled(vae, part) for part in samples.split(DECODED_AT_ONCE)]))
        if self._form:
            vae.to("cpu")
        return images


Denoise = Callable[[Tensor, Tensor], Tensor]
"""(x_t, timestep as a 0-dim tensor) -> prediction."""


def make_scheduler(config: DiffusionConfig, *, clips: bool) -> Any:
    """Return a diffusers scheduler; `clips` limits predictions to -1..1, which is correct for pixels only."""
    shared = make_scheduler_config(config.noise, config.model.target)
    if config.sample.sampler == "ddim":
        return import_diffusers_class("DDIMScheduler")(**shared, clip_sample=clips)
    return import_diffusers_class("DPMSolverMultistepScheduler")(**shared, algorithm_type="dpmsolver++")


def check_steps(steps: int, config: DiffusionConfig) -> None:
    """Refuse more sampling steps than the model has timesteps."""
    if steps > config.noise.steps:
        raise ConfigError(
            f"{steps} sampling steps, but the model has {config.noise.steps} timesteps",
            fix=f"set sample.steps (--steps) to at most {config.noise.steps}",
        )


@torch.no_grad()
def run_sampler(
    denoise: Denoise, scheduler: Any, start: Tensor, steps: int, kept: int = 0
) -> tuple[Tensor, list[Tensor]]:
    """Return the samples, and `kept` evenly spaced intermediate states, starting with the noise."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # diffusers passes tensors to numpy
        scheduler.set_timesteps(steps, device=start.device)
    state, path = start.float(), []
    # Numbers of the steps before which the state is kept.
    wanted = {round(k * len(scheduler.timesteps) / max(1, kept)) for k in range(kept)}
    for number, timestep in enumerate(scheduler.timesteps):
        if number in wanted:
            path.append(state)
        prediction = denoise(state, timestep).float()
        state = scheduler.step(prediction, timestep, state).prev_sample.float()
    return state, path


def make_guided_denoiser(model: nn.Module, conditions: Conditions, given: Batch, guidance: float) -> Denoise:
    """Return a denoiser with classifier-free guidance (Ho and Salimans 2022) for the conditions `given`."""

    def predict(state: Tensor, timestep: Tensor, batch: Batch) -> Tensor:
        steps = timestep.to(state.device).expand(len(state))
        found: Tensor = model(state, steps, **conditions.make_keywords(batch), return_dict=False)[0]
        return found.float()

    def denoise(state: Tensor, timestep: Tensor) -> Tensor:
        conditional = predict(state, timestep, given)
        if guidance == 1 or not conditions.is_conditional:
            return conditional
        unconditional = predict(state, timestep, conditions.make_empty(len(state), state.device))
        # Guidance 0 gives the unconditional prediction, 1 the conditional one; above 1 it extrapolates.
        return unconditional + guidance * (conditional - unconditional)

    return denoise


def draw_path(states: Sequence[Array]) -> Array:
    """Draw one row per sample, from noise on the left to the image on the right."""
    steps = np.stack(states, axis=1)
    return arrange_grid(steps.reshape(-1, *steps.shape[2:]), columns=len(states))


FRAGILE = (
    "noising: in a half format no noise would be added at the first timesteps",
    "vae.posterior: exp of log-variances up to 20",
    "loss.mse: squares of small differences",
)


def build(config: DiffusionConfig, store: Mapping[str, Any] | None = None) -> Workload:
    """Build the workload for `config.data.dir`; the `store` of an earlier run fixes classes and the config of the
    U-Net."""
    config, adopted, notes = adopt_settings(config) if store is None else (config, {}, [])
    text = ", ".join(f"{path}={value}" for path, value in adopted.items())
    check_steps(config.sample.steps, config)
    data = open_diffusion_data(config.data, config.model.conditioning)
    classes = tuple(store["classes"]) if store else data.classes
    check_same_classes(classes, data.classes)
    parts = open_parts(config, classes)
    model = build_unet(config, parts, store)
    samples = open_samples(config, data, parts, store)
    found = {"unet": dump_config(model), "classes": list(classes), **samples.store}
    samples = replace(
        samples,
        store=found,
        notes=(*data.notes, *notes),
        about=(
            *data.about,
            *([("from the weights", text)] if text else []),
            *samples.about,
            *describe_conditions(config, parts),
        ),
        settled={**adopted, **samples.settled},
    )
    return make_workload(config, parts, model, samples, with_vae=config.data.cache == "off")


def describe_conditions(config: DiffusionConfig, parts: DiffusionParts) -> tuple[tuple[str, str], ...]:
    """Return a line about the U-Net's conditions for the run's header."""
    if not parts.conditions.is_conditional:
        return ()
    return (("condition", f"{parts.conditions.about}; {config.model.drop_condition:.0%} of samples train without it"),)


def make_workload(
    config: DiffusionConfig, parts: DiffusionParts, model: Net, samples: OpenedData, *, with_vae: bool = True
) -> Workload:
    """Build the workload from its networks and samples."""
    return Workload(
        name=config.workload,
        model=model,
        prepare=DiffusionPrepare(config, parts),
        forward=DiffusionForward(config, parts),
        loss=denoising_loss,
        metrics=partial(DenoisingMetrics, config.noise.steps),
        metric="mse",
        mode="min",
        scoring="mse: unweighted, over all held-out samples; mse/A-B: timesteps A to B. Each sample has fixed noise",
        fragile=FRAGILE,
        blocks=find_blocks(model),
        frozen=list_frozen_parts(config, parts, with_vae=with_vae),
        sample=ImageSampler(config, parts, samples.store).draw_sheet,
        scores_raw=True,
        **samples.to_fields(),
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
    data = OpenedData(train=samples, val=samples, store=store)
    return autoencoder.make_workload(config, autoencoder.build_model(config), data)


def build_on_samples(config: DiffusionConfig, store: Store, samples: Samples) -> Workload:
    """Build the workload of a diffusion model on given samples."""
    parts = open_parts(config, tuple(store["classes"]))
    data = OpenedData(train=samples, val=samples, store=store)
    return make_workload(config, parts, build_unet(config, parts), data)


# --- halfstep guide ---


SMALLEST_LEVEL = 4
"""Smallest useful side of the deepest level, in pixels."""


class Guide(Guiding):
    """Guide to diffusion models."""

    small_on_cpu = {"data.image_size": 32, "model.channels": (32, 64, 64), "model.attention": (2,)}

    def open(self, config: DiffusionConfig | VaeConfig) -> OpenedData:
        data = open_diffusion_data(config.data)
        return OpenedData(
            train=make_square_samples(data.train, config.data.image_size),
            val=make_square_samples(data.val, config.data.image_size),
            store={"classes": []},
            classes=("picture",),
            notes=data.notes,
            sides=measure_median_size(len(data.train), lambda index: read_size(data.train.paths[index])),
        )

    def suggest_for_side(self, config: DiffusionConfig | VaeConfig, side: int) -> dict[str, Any]:
        """Return an image size up to `side` that every level can halve, with fewer levels for small images."""
        levels = len(config.model.channels)
        while levels > 1 and side >> (levels - 1) < SMALLEST_LEVEL:
            levels -= 1
        step = 2 ** (levels - 1)
        found: dict[str, Any] = {"data.image_size": max(step, side // step * step)}
        if levels < len(config.model.channels):
            found["model.channels"] = tuple(config.model.channels[:levels])
        return found


class VaeGuide(Guide):
    """Guide to VAEs."""

    small_on_cpu = {"data.image_size": 64, "model.channels": (32, 64, 64)}


# --- export ---
#
# pixels, unconditional     DDPMPipeline latents, unconditional    LDMPipeline (the VAE as its vqvae) latents, text
# StableDiffusionPipeline others                    ConditionalPipeline (conditional_pipeline.py, copied to the folder;
# trust_remote_code=True)


MEASURED_IMAGES = 512
"""Training images on which the scale of the latents is measured."""


def export(weights: LazyTensors, config: DiffusionConfig, store: Store, folder: Path, device: torch.device) -> None:
    """Export the U-Net as a pipeline with everything that sampling needs."""
    parts = open_parts(config, tuple(store["classes"]))
    shared = make_scheduler_config(config.noise, config.model.target)
    with silence_transformers():
        _save_pipeline(folder, _load_net(store["unet"], weights), parts, shared)


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
    vae = _load_net(store["vae"], take(weights, "vae.")).to(device)
    vae.register_to_config(scaling_factor=measure_scale(vae, config, device))
    vae.save_pretrained(folder / "vae")


def measure_scale(vae: Net, config: VaeConfig, device: torch.device) -> float:
    """Return 1 / standard deviation of the latents of training images, encoded in fp32."""
    samples = make_square_samples(open_diffusion_data(config.data).train, config.data.image_size)
    images = pick_images(samples, MEASURED_IMAGES)
    return CODEC.measure_scale(vae, (some.to(device) for some in images.split(ENCODED_AT_ONCE)), source="this run")


def _load_net(config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> Net:
    """Return a network with these weights, in fp32."""
    with torch.device("meta"):
        net = build_net(config).eval()
    net.load_state_dict(take(weights, dtype=torch.float32), assign=True)
    return net
