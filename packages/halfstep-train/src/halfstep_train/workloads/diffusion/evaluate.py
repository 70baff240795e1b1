"""Evaluation of diffusion models and VAEs, and prediction: errors by timestep, grids, reconstructions, FID, KID.

torchmetrics computes FID and KID. The user gives the feature network as a TorchScript file, since the usual one
(Inception) would have to be downloaded.
"""

from __future__ import annotations

import atexit
import shutil
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from halfstep.errors import ConfigError, ModelError
from halfstep_train.config.schema import RunConfig
from halfstep_train.data.files import list_some
from halfstep_train.data.loader import Key
from halfstep_train.report.run_report import Answer, Bar, Cell, Failure
from halfstep_train.workloads.base.kind import Store
from halfstep_train.workloads.base.sheets import Array, arrange_grid
from halfstep_train.workloads.base.using import (
    EvaluateRequest,
    Input,
    LookAt,
    PlainEvaluation,
    PredictRequest,
    TrainedModel,
    save_picture,
    spread_indices,
    use_all_pictures,
)
from halfstep_train.workloads.base.workload import Batch, Workload
from halfstep_train.workloads.diffusion.build import PATH_IMAGES, PATH_STATES, DiffusionForward, ImageSampler, draw_path
from halfstep_train.workloads.diffusion.config import SAMPLERS, DiffusionConfig
from halfstep_train.workloads.diffusion.data import to_bytes
from halfstep_train.workloads.diffusion.networks import (
    ClassConditions,
    Conditions,
    TextConditions,
    build_unet,
    list_frozen_parts,
    open_parts,
)
from halfstep_train.workloads.diffusion.scores import DenoisingMetrics

LARGEST_SUBSET, NUM_SUBSETS = 100, 10
"""Subsets over which KID is averaged."""
SHOWN = 8
"""Images in the sheet of reconstructions."""


class DiffusionEvaluation(PlainEvaluation):
    """Evaluation with errors by timestep, a grid of samples, and FID and KID if a feature network is given."""

    @staticmethod
    def change_data_folder(config: RunConfig, folder: Path) -> RunConfig:
        """Return settings for another folder. Its latents are cached in a temporary file that is deleted when this
        process ends, without flipped copies, which only training uses."""
        assert isinstance(config, DiffusionConfig)
        found = use_all_pictures(config, folder)
        if config.data.cache == "off":
            return found
        scratch = Path(tempfile.mkdtemp(prefix="halfstep-latents-"))
        atexit.register(shutil.rmtree, scratch, ignore_errors=True)
        file = str(scratch / "latents.cache")
        return found.replace(data={"cache": config.data.cache, "cache_file": file, "flip": 0.0})

    metrics: DenoisingMetrics

    def __init__(self, workload: Workload) -> None:
        super().__init__(workload)
        self.sheet: Mapping[str, Array] = {}

    def score_with_options(self, request: EvaluateRequest) -> dict[str, float] | None:
        """Draw samples and compute their distances; return None, so that validation runs too."""
        assert isinstance(self.workload.forward, DiffusionForward)
        sampler = ImageSampler(request.config, self.workload.forward.parts, self.workload.store)
        if request.options["features"]:
            self.metrics.more = self._compute_distances(sampler, request)
        with request.trained.inference():
            self.sheet = sampler.draw_sheet(request.trained.model, Key.for_sampling(request.options["seed"]))
        return None

    def score_classes(self) -> tuple[dict[str, Cell], ...]:
        """Return the mean squared error of each bucket of timesteps."""
        found = self.metrics.compute()
        rows = {name.removeprefix("mse/"): value for name, value in found.items() if name.startswith("mse/")}
        return tuple({"timesteps": name, "mse": value} for name, value in rows.items())

    def draw_pictures(self, folder: Path, look: LookAt) -> list[Path]:
        paths = []
        for name, picture in self.sheet.items():
            paths.append(folder / f"{name}.png")
            Image.fromarray(picture).save(paths[-1])
        return paths

    def _compute_distances(self, sampler: ImageSampler, request: EvaluateRequest) -> dict[str, float]:
        """Sample images and return their distances to the held-out images."""
        trained, options, size = request.trained, request.options, request.config.train.batch_size
        features = open_features(Path(options["features"]), trained.device)
        num = options["num"] or len(self.workload.val_samples)
        real = load_real_pictures(self.workload, sampler, trained.device)
        made = []
        with request.phase("Sampling", num) as bar, trained.inference():
            for start in range(0, num, size):
                key = Key.for_sampling(options["seed"], start)
                made.append(sampler.make_images(trained.model, key, min(size, num - start))[0])
                for _ in range(len(made[-1])):
                    bar.advance()
        return measure_distances(real, torch.cat(made), features, trained.device, size)


def load_real_pictures(workload: Workload, sampler: ImageSampler, device: torch.device) -> Tensor:
    """Return the held-out images as bytes (N, H, W, 3); cached latents are decoded first."""
    samples = workload.val_samples
    found = [samples.sample(k, key=(0, 0, k)) for k in range(len(samples))]
    if "image" in found[0]:
        return torch.stack([one["image"] for one in found])
    # The first half of the moments is the mean.
    means = torch.stack([one["moments"].chunk(2)[0] for one in found])
    return sampler.decode_means(means.to(device))


def measure_distances(
    real: Tensor, made: Tensor, features: nn.Module, device: torch.device, size: int
) -> dict[str, float]:
    """Return `fid` (computed in float64), and `kid` with its standard deviation over subsets (in float32)."""
    from torchmetrics.image.fid import FrechetInceptionDistance
    from torchmetrics.image.kid import KernelInceptionDistance

    subset = min(LARGEST_SUBSET, len(real), len(made))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # KID warns that it stores all features
        fid = FrechetInceptionDistance(feature=features, normalize=False).to(device).set_dtype(torch.float64)
        kid = KernelInceptionDistance(feature=features, subsets=NUM_SUBSETS, subset_size=subset).to(device)
    for meter in (fid, kid):
        for pictures, is_real in ((real, True), (made, False)):
            for part in pictures.split(size):
                meter.update(part.permute(0, 3, 1, 2).to(device), real=is_real)
    with torch.random.fork_rng(devices=[]):  # KID draws subsets from the global generator
        torch.manual_seed(0)
        mean, deviation = kid.compute()
    return {"fid": float(fid.compute()), "kid": float(mean), "kid_std": float(deviation)}


def open_features(path: Path, device: torch.device) -> nn.Module:
    """Load a TorchScript module that maps images (N, 3, H, W) uint8 to features (N, D)."""
    try:
        module: nn.Module = torch.jit.load(str(path), map_location=device).eval()
    except (RuntimeError, ValueError, OSError) as error:
        raise ModelError(
            f"cannot read the features in {path}",
            why="it is not a TorchScript file" if path.is_file() else "there is no such file",
            fix="torch.jit.script(module).save(FILE), with a module from uint8 images (N, 3, H, W) to features (N, D)",
        ) from error
    return module


class VaeEvaluation(PlainEvaluation):
    """Evaluation of a VAE: draws images above their reconstructions."""

    change_data_folder = staticmethod(use_all_pictures)

    def draw_pictures(self, folder: Path, look: LookAt) -> list[Path]:
        pairs = [look(index) for index in spread_indices(len(self.workload.val_samples), SHOWN)]
        images = [batch["image"] for batch, _ in pairs] + [outputs["image"] for _, outputs in pairs]
        path = folder / "reconstructions.png"
        Image.fromarray(arrange_grid(to_bytes(torch.cat(images)).numpy(), columns=len(pairs))).save(path)
        return [path]


# --- halfstep predict ---


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
