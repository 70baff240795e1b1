"""`halfstep predict`: a diffusion model draws samples from a seed, a VAE reconstructs images."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from PIL import Image
from torch import Tensor

from halfstep.errors import ConfigError
from halfstep_train.data.files import IMAGE_ENDINGS, list_some
from halfstep_train.data.image_samples import crop_centre
from halfstep_train.data.images import open_image_file
from halfstep_train.data.seeds import Key
from halfstep_train.report.progress import Bar
from halfstep_train.report.results import Answer, Failure
from halfstep_train.workloads.base.kind import Store
from halfstep_train.workloads.base.sheets import arrange_grid
from halfstep_train.workloads.base.using import FilePredictor, Input, PredictRequest, TrainedModel, save_picture
from halfstep_train.workloads.base.vae_trainer import VaeNet
from halfstep_train.workloads.base.workload import Batch
from halfstep_train.workloads.diffusion import vae as autoencoder
from halfstep_train.workloads.diffusion.config import SAMPLERS, DiffusionConfig, VaeConfig
from halfstep_train.workloads.diffusion.data import scale_images, to_bytes
from halfstep_train.workloads.diffusion.networks import (
    ClassConditions,
    Conditions,
    TextConditions,
    build_unet,
    list_frozen_parts,
    open_parts,
)
from halfstep_train.workloads.diffusion.sampling import PATH_IMAGES, PATH_STATES, ImageSampler, draw_path


class SamplePredictor:
    """Predictor of diffusion models: draws samples from a seed, the same for any batch size."""

    endings: tuple[str, ...] = ()

    def __init__(self, config: DiffusionConfig, store: Store) -> None:
        self.config, self.parts = config, open_parts(config, tuple(store["classes"]))
        self.model = build_unet(config, self.parts, store)
        self.frozen = list_frozen_parts(config, self.parts, with_vae=config.data.cache == "off")
        self.store = store

    def answer_all(
        self, inputs: list[Input], trained: TrainedModel, request: PredictRequest, bar: Bar
    ) -> Iterator[Answer | Failure]:
        """Yield one answer per sample; at the end, write a grid of all samples and a picture of the sampling path."""
        options, out = request.options, request.out
        assert out is not None
        num, size = int(options["num"]), self.config.train.batch_size
        bar.total = num
        sampler = ImageSampler(set_sampling(self.config, options), self.parts, self.store)
        samples: list[Tensor] = []
        path: list[Tensor] = []
        for start in range(0, num, size):
            here = min(size, num - start)
            key = Key.for_sampling(int(options["seed"]), start)
            given = make_conditions(self.parts.conditions, options, here, trained.device)
            with trained.inference():
                images, states = sampler.make_images(
                    trained.model, key, here, conditions=given, kept=0 if start else PATH_STATES
                )
            samples.append(images)
            path = path or [*states, images[:PATH_IMAGES]]
            for k, image in enumerate(images, start=start):
                file = save_picture(Image.fromarray(image.numpy()), out / f"{k:04d}.png")
                found = {"image": str(file), "seed": options["seed"], "number": k}
                yield Answer(file=file.name, found=found, brief={"image": str(file)})
        save_picture(Image.fromarray(arrange_grid(torch.cat(samples).numpy())), out / "grid.png")
        save_picture(Image.fromarray(draw_path([state.numpy() for state in path])), out / "path.png")


def set_sampling(config: DiffusionConfig, options: Mapping[str, Any]) -> DiffusionConfig:
    """Return the config with the sampling options that were given."""
    names = ("steps", "sampler", "guidance")
    given = {name: options[name] for name in names if options.get(name) is not None}
    if given.get("sampler", "ddim") not in SAMPLERS:
        raise ConfigError(f"unknown sampler {given['sampler']!r}", fix=" or ".join(SAMPLERS))
    return config.replace(sample=given)


def make_conditions(conditions: Conditions, options: Mapping[str, Any], num: int, device: torch.device) -> Batch:
    """Return the conditions given by `--prompt` or `--class`; empty conditions without either."""
    prompt, name = options["prompt"], options["class"]
    batch = conditions.make_empty(num, device)
    if prompt is not None:
        if not isinstance(conditions, TextConditions):
            raise ConfigError(f"--prompt {prompt!r}: the model was not trained with text", fix="leave it out")
        batch["tokens"] = conditions.tokenize([prompt]).to(device).expand(num, -1)
    if name is not None:
        if not isinstance(conditions, ClassConditions):
            raise ConfigError(f"--class {name}: the model was not trained with classes", fix="leave it out")
        batch["label"] = torch.full((num,), _find_class(conditions, str(name)), device=device)
    return batch


def _find_class(conditions: ClassConditions, name: str) -> int:
    if name in conditions.names:
        return conditions.names.index(name)
    if name.isdecimal() and int(name) < len(conditions.names):
        return int(name)
    raise ConfigError(f"unknown --class {name!r}", fix=f"use one of {list_some(conditions.names, 10)}")


class PicturePredictor(FilePredictor):
    """Predictor of VAEs: writes each image next to its reconstruction."""

    endings = IMAGE_ENDINGS

    def __init__(self, config: VaeConfig, store: Store) -> None:
        self.config, self.model = config, autoencoder.build_model(config, store)

    def answer_file(self, item: Input, trained: TrainedModel, request: PredictRequest) -> Answer:
        assert request.out is not None
        with open_image_file(item.path) as picture:
            pixels = torch.from_numpy(crop_centre(picture, self.config.data.image_size, 1.0)).unsqueeze(0)
        with trained.inference():
            image = scale_images({"image": pixels.to(trained.device)}, key=(), flip=0.0)
            found = to_bytes(cast(VaeNet, trained.model).decode_means(image))
        error = (found.double() - pixels.double()).square().mean()
        psnr = float(10 * torch.log10(255**2 / error.clamp(min=1e-12)))
        both = Image.fromarray(torch.cat([pixels, found], dim=2)[0].numpy())
        file = save_picture(both, request.out / item.name.with_suffix(".png"))
        cells: dict[str, str | float] = {"picture": str(file), "psnr": psnr}
        brief = {"image and reconstruction": str(file), "PSNR": f"{psnr:.2f} dB"}
        return Answer(file=str(item.path), found=cells, brief=brief)
