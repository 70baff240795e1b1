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
from halfstep_train.workloads.diffusion.config import DiffusionConfig, VaeConfig
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
        self.sampler = ImageSampler(config, self.parts, store)

    def answer_all(
        self, inputs: list[Input], trained: TrainedModel, request: PredictRequest, bar: Bar
    ) -> Iterator[Answer | Failure]:
        """Yield one answer per sample; at the end, write a grid of all samples and a picture of the sampling path."""
        options, out = request.options, request.out
        assert out is not None
        num, size = int(options["num"]), self.config.train.batch_size
        bar.total = num
        samples: list[Tensor] = []
        path: list[Tensor] = []
        for start in range(0, num, size):
            images, states = self._make_images(trained, options, start, min(size, num - start))
            samples.append(images)
            path = path or [*states, images[:PATH_IMAGES]]
            for k, image in enumerate(images, start=start):
                file = save_picture(Image.fromarray(image.numpy()), out / f"{k:04d}.png")
                found = {"image": str(file), "seed": options["seed"], "number": k}
                yield Answer(file=file.name, found=found, brief={"image": str(file)})
        save_picture(Image.fromarray(arrange_grid(torch.cat(samples).numpy())), out / "grid.png")
        save_picture(Image.fromarray(draw_path([state.numpy() for state in path])), out / "path.png")

    def _make_images(
        self, trained: TrainedModel, options: Mapping[str, Any], start: int, num: int
    ) -> tuple[Tensor, list[Tensor]]:
        with trained.inference():
            return self.sampler.make_images(
                trained.model,
                Key.for_sampling(int(options["seed"]), start),
                num,
                conditions=make_conditions(self.parts.conditions, options, num, trained.device),
                kept=PATH_STATES if start == 0 else 0,
                **{name: options[name] for name in ("steps", "sampler", "guidance")},
            )


def make_conditions(conditions: Conditions, options: Mapping[str, Any], num: int, device: torch.device) -> Batch:
    """Return the conditions given by `--prompt` or `--class`; empty conditions without either."""
    prompt, name = options["prompt"], options["class"]
    if prompt is not None and not isinstance(conditions, TextConditions):
        raise ConfigError(f"--prompt {prompt!r}: the model was not trained with text", fix="leave it out")
    if name is not None and not isinstance(conditions, ClassConditions):
        raise ConfigError(f"--class {name}: the model was not trained with classes", fix="leave it out")
    batch = conditions.make_empty(num, device)
    if isinstance(conditions, TextConditions) and prompt is not None:
        batch["tokens"] = conditions.tokenize([prompt]).to(device).expand(num, -1)
    if isinstance(conditions, ClassConditions) and name is not None:
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
