"""Stage 2: decoupled diffusion of latents, conditioned on buildings, antenna and cars.

The first stage is a frozen module: forward encodes the true map without gradients, so that the encoder runs inside the
compiled step. Validation also samples every map, from noise keyed by the map, and scores it against the truth.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from PIL import Image
from torch import Tensor, nn

from halfstep.errors import format_count
from halfstep.islands import in_fp32
from halfstep.recompute import set_recompute
from halfstep_train.data import noise
from halfstep_train.data.loader import Batch, Samples, make_generator
from halfstep_train.models.layers import LEVELS_HALVE, divide_side
from halfstep_train.models.weights import Weights, load_weights_file_
from halfstep_train.workloads.base.frozen_vae import LatentDraws, choose_vae_format
from halfstep_train.workloads.base.kind import Store
from halfstep_train.workloads.base.using import Guiding
from halfstep_train.workloads.base.workload import FrozenPart, OpenedData, Workload
from halfstep_train.workloads.radio.config import (
    SMALL_FIRST_STAGE,
    FirstStageConfig,
    RadioDiffConfig,
    RadioDiffModelConfig,
    RadioVaeConfig,
)
from halfstep_train.workloads.radio.first_stage import (
    MEASURED_ON_HOST,
    add_latents,
    build_vae_model,
    get_latent_shape,
    get_reduction,
    make_vae_workload,
    measure_scale,
    open_first_stage,
    read_some_maps,
)
from halfstep_train.workloads.radio.maps import (
    draw_condition,
    draw_gain,
    find_data,
    make_sampler,
    scale_gain,
    to_signed,
    to_unsigned,
)
from halfstep_train.workloads.radio.names import rename_unet_weights
from halfstep_train.workloads.radio.scores import SCORING, RadioMetrics
from halfstep_train.workloads.radio.swin import PatchMerging, SwinBlock
from halfstep_train.workloads.radio.unet import LinearAttention, RadioUNet, Relation, TimedBlock
from halfstep_train.workloads.radio.vae import CODEC, RadioVAE, ResidualBlock

# --- the diffusion process ---
#
# The drift C = -x0 attenuates a latent x0 while noise grows: x_t = x0 + C t + sqrt(t) eps for t in (0, 1]. The network
# predicts C and eps. A reverse step of size s uses x0 = x_t - C t - sqrt(t) eps and sets C := -x0:
#
#     x_{t-s} = x_t - C s - s / sqrt(t) eps + sqrt(s (t - s) / t) draw
#
# The last step has s = t and no draw.


SMALLEST_TIME = 1e-4

Predict = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""(x_t, times) -> predicted C and noise."""


def scale_times(uniform: Tensor) -> Tensor:
    """Map uniform draws in 0..1 to training times in (SMALLEST_TIME, 1]."""
    return uniform * (1.0 - SMALLEST_TIME) + SMALLEST_TIME


@in_fp32
def add_noise(x0: Tensor, time: Tensor, noise: Tensor) -> Tensor:
    """Return x_t = x0 + C t + sqrt(t) noise with C = -x0."""
    t = _expand_time(time)
    return x0 - x0 * t + t.sqrt() * noise


@in_fp32
def recover_x0(x_t: Tensor, time: Tensor, drift: Tensor, noise: Tensor) -> Tensor:
    """Return the x0 implied by a prediction of C and noise."""
    t = _expand_time(time)
    return x_t - drift * t - t.sqrt() * noise


@in_fp32
def ddm_loss(drift: Tensor, noise: Tensor, x0: Tensor, true_noise: Tensor, time: Tensor, *, weighted: bool) -> Tensor:
    """Return the loss (B,): the mean of squared and absolute errors of C and noise.

    With weights, C counts 2 exp(1 - t), which falls from 5.4 to 2, and noise counts exp(sqrt(t)), which rises from 1 to
    2.7.
    """
    # The true drift is C = -x0.
    errors = (drift + x0, noise - true_noise)
    parts = [(_average(error.square()) + _average(error.abs())) / 2 for error in errors]
    weights = (2 * torch.exp(1 - time), torch.exp(time.sqrt())) if weighted else (1.0, 1.0)
    return weights[0] * parts[0] + weights[1] * parts[1]


def list_times(steps: int, *, split_last: bool = True) -> tuple[float, ...]:
    """Return the time of each network call, from 1 down.

    By default the last of the equal steps is split at SMALLEST_TIME, as in the public sampler: N steps take N + 1
    calls. Without the split, N steps take N calls.
    """
    times = tuple(1 - step / steps for step in range(steps))
    return (*times, SMALLEST_TIME) if split_last else times


@torch.no_grad()
def sample_latents(predict: Predict, start: Tensor, draws: Sequence[Tensor], times: Sequence[float]) -> Tensor:
    """Sample latents from the noise `start`; every step but the last adds one of `draws`."""
    x = start.float()
    for index, now in enumerate(times):
        after = times[index + 1] if index + 1 < len(times) else 0.0
        batch_time = torch.full((len(x),), now, device=x.device)
        drift, noise = (found.float() for found in predict(x, batch_time))
        # The predicted C and noise imply an x0; C := -x0 makes drift and state consistent, as in the public sampler.
        drift = -recover_x0(x, batch_time, drift, noise)
        s = now - after
        # One reverse step of size s; see the module docstring for the formula.
        x = x - drift * s - s / math.sqrt(now) * noise
        if after > 0:
            x = x + math.sqrt(s * after / now) * draws[index]
    return x


def _expand_time(time: Tensor) -> Tensor:
    return time.view(-1, 1, 1, 1)


def _average(values: Tensor) -> Tensor:
    return values.flatten(1).mean(1)


FRAGILE = (
    "noising: x_t, C and noise are fp32, whatever the format of the latents",
    "loss: squared and absolute errors, weighted by time",
    "fourier_filter: sums over all positions; FFT does not support bf16",
    "linear_attention: keys near 1 / positions, values divided by positions",
    "weights of convolutions: standardised in fp32 with the same epsilon in every format",
    "time: angles of hundreds of radians",
    "latents: drawn from mean and log variance",
)

# Classes of blocks that are compiled one by one in captured steps.
REPEATED = (SwinBlock, PatchMerging, TimedBlock, Relation, LinearAttention, ResidualBlock)


def build(config: RadioDiffConfig, store: Mapping[str, Any] | None = None) -> Workload:
    """Build the workload for `config.data.dir`; the `store` of an earlier run fixes sizes and latent scale."""
    data = find_data(config)
    stage = open_first_stage(config)
    why_scale, is_new = "stored with the run", store is None
    if store is None:
        scale, why_scale = _choose_scale(config, stage.vae, stage.scale_factor, data)
        store = {"sizes": stage.sizes, "scale_factor": scale, "image_size": config.data.image_size}
    data = _settle_format(config, stage.vae, data) if is_new else data
    data, store = add_latents(config, data, stage.vae, store)
    model = build_unet(config, store)
    if is_new:  # a resumed run loads its checkpoint later
        if config.model.pyramid.weights:
            load_weights_file_(model.condition, config.model.pyramid.weights, select_pyramid_weights)
        if config.model.weights:
            load_weights_file_(model, config.model.weights, select_unet_weights)
    about = (*data.about, ("latents", f"times {store['scale_factor']:.4g}: {why_scale}"))
    data = replace(data, store=store, about=about)
    return make_workload(config, model, FrozenPart(module=stage.vae, source=stage.source), data)


def _choose_scale(
    config: RadioDiffConfig, vae: RadioVAE, measured: float | None, data: OpenedData
) -> tuple[float, str]:
    """Return the factor of the latents, and where it comes from."""
    scale = config.model.scale_factor
    if scale != "auto":
        return scale, "model.scale_factor"
    if measured is not None:
        return measured, "1 / their standard deviation, measured by stage 1"
    threshold, source = config.data.threshold, str(config.model.vae)
    found = measure_scale(vae, data.train, count=MEASURED_ON_HOST, threshold=threshold, source=source)
    return found, f"1 / their standard deviation over {MEASURED_ON_HOST} training maps"


def _settle_format(config: RadioDiffConfig, vae: RadioVAE, data: OpenedData) -> OpenedData:
    """Choose the first stage's format if precision.modules names it; otherwise it follows the precision plan."""
    modules = config.precision.modules
    if "vae" not in modules:
        return data

    def read_images() -> Tensor:
        return torch.cat(list(read_some_maps(data.train, MEASURED_ON_HOST, config.data.threshold)))

    name, why = choose_vae_format(config, vae, CODEC.decode_means, read_images, modules["vae"])
    about = (*data.about, ("first stage's format", f"{name}: {why}"))
    return replace(data, about=about, settled={"precision.modules": {**modules, "vae": name}})


def describe_steps(steps: int, settings: RadioDiffModelConfig) -> str:
    """Return the number of sampling steps and network calls as text."""
    return f"{format_count(steps, 'step')}, {format_count(steps + int(settings.extra_call), 'call')} of the network"


def build_unet(config: RadioDiffConfig, store: Mapping[str, Any]) -> RadioUNet:
    """Build the U-Net and its condition encoder for the latents of the first stage."""
    settings, reduction = config.model, get_reduction(store["sizes"])
    channels, side, _ = get_latent_shape(store["sizes"], store["image_size"])
    divide_side(store["image_size"], reduction * 2 ** (len(settings.multipliers) - 1), LEVELS_HALVE)
    unet = RadioUNet(settings, channels=channels, latent_size=(side, side), patch=reduction)
    set_recompute(unet, "blocks" if config.train.activation_checkpointing else "none")
    return unet


def select_unet_weights(weights: Weights) -> Weights:
    """Return the U-Net's weights under our names, from our files or from a public checkpoint with both stages."""
    inner = {name.removeprefix("model."): value for name, value in weights.items() if name.startswith("model.")}
    return rename_unet_weights(inner or weights)


def select_pyramid_weights(weights: Weights) -> Weights:
    """Return torchvision's weights without its last norm and head, which a pyramid does not have."""
    return {name: value for name, value in weights.items() if not name.startswith(("norm.", "head."))}


class Denoising:
    """One training step, and sampling: encode, add noise, denoise, decode; with a given first stage and latent
    scale."""

    def __init__(
        self, config: RadioDiffConfig, store: Mapping[str, Any], vae: RadioVAE, *, steps: int | None = None
    ) -> None:
        self.config, self.vae, self.scale = config.model, vae, store["scale_factor"]
        self.draw_latents = LatentDraws(vae, CODEC, scale=self.scale)
        self.threshold = config.data.threshold
        self.latent = get_latent_shape(store["sizes"], store["image_size"])
        self.steps = steps or config.model.sampling_steps

    def prepare(self, batch: Batch, *, key: tuple[int, ...], training: bool) -> Batch:
        """Convert bytes to maps, and draw all random numbers of the step."""
        condition = to_signed(batch["condition"].float() / 255)
        num, device = len(condition), condition.device
        draws = {
            "posterior_noise": noise.normal(key, num, self.latent, device, stream="posterior"),
            "noise": noise.normal(key, num, self.latent, device, stream="eps"),
            "time": scale_times(noise.uniform(key, num, (), device, stream="time")),
        }
        if not training:
            draws |= self.draw_sampling_noise(key, num, device)
        truth = scale_gain(batch["gain"], self.threshold)
        return batch | {"truth": truth, "image": to_signed(truth), "condition": condition, **draws}

    def draw_sampling_noise(self, key: tuple[int, ...], num: int, device: torch.device) -> Batch:
        """Draw the initial noise (B, ...) and the noise of each step (B, steps, ...), keyed by sample."""
        return {
            "start": noise.normal(key, num, self.latent, device, stream="start"),
            "draws": noise.normal(key, num, (self.steps, *self.latent), device, stream="draws"),
        }

    def forward(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Predict C and noise; in validation, also sample the map."""
        unet = cast(RadioUNet, model)
        with torch.no_grad():
            x0 = self.draw_latents(batch)
            x_t = add_noise(x0, batch["time"], batch["noise"])
        features = unet.condition(batch["condition"])
        drift, predicted = unet.denoise(x_t, batch["time"], features)
        found = {
            "drift": drift,
            "predicted": predicted,
            "x0": x0,
            # The true drift is C = -x0.
            "error_c": (drift + x0).detach().square().flatten(1).mean(1),
            "error_noise": (predicted - batch["noise"]).detach().square().flatten(1).mean(1),
        }
        return found | {"map": self.sample(unet, features, batch)} if "start" in batch else found

    def compute_loss(self, outputs: dict[str, Tensor], batch: Batch) -> tuple[Tensor, float]:
        drift, predicted, x0 = outputs["drift"], outputs["predicted"], outputs["x0"]
        losses = ddm_loss(drift, predicted, x0, batch["noise"], batch["time"], weighted=self.config.weighted_loss)
        return losses.mean(), len(losses)

    def sample(self, unet: RadioUNet, features: list[Tensor], batch: Batch) -> Tensor:
        """Sample maps in 0..1 from the batch's noise. `features` is the encoded condition, the same for all steps."""
        times = list_times(self.steps, split_last=self.config.extra_call)
        draws = list(batch["draws"].unbind(1))
        latents = sample_latents(lambda x, time: unet.denoise(x, time, features), batch["start"], draws, times)
        return to_unsigned(self.vae.decode(latents / self.scale))


def make_workload(config: RadioDiffConfig, model: RadioUNet, vae: FrozenPart, data: OpenedData) -> Workload:
    """Build the workload from its model, first stage and data."""
    denoising, settings = Denoising(config, data.store, cast(RadioVAE, vae.module)), config.model
    data = replace(data, about=(*data.about, ("sampling", describe_steps(settings.sampling_steps, settings))))
    return Workload(
        name=config.workload,
        model=model,
        prepare=denoising.prepare,
        forward=denoising.forward,
        loss=denoising.compute_loss,
        metrics=RadioMetrics,
        metric="nmse",
        mode="min",
        fragile=FRAGILE,
        blocks={kind: kind.forward for kind in REPEATED},
        scoring=f"of samples: {SCORING}",
        frozen={"vae": vae},
        sample=make_sampler(data.val, denoising.prepare, denoising.forward),
        **data.to_fields(),
    )


RadioConfig = RadioDiffConfig | RadioVaeConfig


def make_random_store(config: RadioConfig) -> dict[str, Any]:
    sizes = config.model.first_stage.model_dump(mode="json")
    return {"sizes": sizes, "scale_factor": 1.0, "image_size": config.data.image_size}


def make_random_batch(config: RadioConfig, store: Store) -> Batch:
    generator, size, side = make_generator(config.train.seed), config.train.batch_size, config.data.image_size
    shapes = {"gain": (size, 1, side, side), "condition": (size, 3, side, side)}
    drawn = {name: torch.randint(256, shape, dtype=torch.uint8, generator=generator) for name, shape in shapes.items()}
    return {**drawn, "index": torch.arange(size)}


def build_on_samples(config: RadioConfig, store: Store, samples: Samples) -> Workload:
    """Build the workload on given samples. Its first stage has random weights, which cost the same time and memory."""
    store = {**make_random_store(config), **store}
    data = OpenedData(train=samples, val=samples, store=store)
    if isinstance(config, RadioVaeConfig):
        return make_vae_workload(config, build_vae_model(config), data)
    vae = FrozenPart(module=RadioVAE(FirstStageConfig(**store["sizes"])).eval())
    return make_workload(config, build_unet(config, store), vae, data)


# --- halfstep guide ---


SMALL_SIZE = {"data.image_size": 64}
SMALL_UNET: dict[str, Any] = {
    "model.width": 32,
    "model.multipliers": (1, 2),
    "model.windows": ((2, 2), (1, 1)),
    "model.pyramid.width": 32,
    "model.pyramid.depths": (2, 2),
    "model.pyramid.num_heads": (2, 4),
    "model.pyramid.window": 8,
}


class Guide(Guiding):
    """Guide to the first stage, where users start."""

    small_on_cpu = {
        **SMALL_SIZE,
        **SMALL_FIRST_STAGE,
        "model.discriminator.enabled": False,
    }

    def open(self, config: RadioVaeConfig | RadioDiffConfig) -> OpenedData:
        data = find_data(config)
        height, width = data.train.size
        return replace(data, about=(), classes=("map",), sides=(width, height))

    def draw_sample(self, sample: dict[str, Tensor], index: int, classes: tuple[str, ...]) -> tuple[str, Image.Image]:
        """Draw the city with its antenna, and the gain, side by side."""
        city = Image.fromarray(draw_condition(sample["condition"].numpy()))
        gain = Image.fromarray(draw_gain(sample["gain"][0].numpy() / 255))
        both = Image.new("RGB", (city.width + gain.width, city.height))
        both.paste(city, (0, 0))
        both.paste(gain, (city.width, 0))
        return f"map {index}", both

    def suggest_for_side(self, config: RadioVaeConfig | RadioDiffConfig, side: int) -> dict[str, Any]:
        """Return the largest image size up to `side` that every level can halve."""
        levels = len(config.model.first_stage.multipliers)
        if isinstance(config, RadioDiffConfig):
            levels += len(config.model.multipliers) - 1
        step = 2 ** (levels - 1)
        return {"data.image_size": max(step, side // step * step)}


class SecondGuide(Guide):
    """Guide to the second stage; training needs a trained first stage, planning does not."""

    small_on_cpu = {**SMALL_SIZE, **SMALL_FIRST_STAGE, **SMALL_UNET}
