"""Evaluation of diffusion models and VAEs: errors by timestep, sample grids, reconstructions, FID and KID.

torchmetrics computes FID and KID. The user gives the feature network as a TorchScript file, since the usual one
(Inception) would have to be downloaded.
"""

from __future__ import annotations

import atexit
import shutil
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor, nn

from halfstep.errors import ModelError
from halfstep_train.config.schema import RunConfig
from halfstep_train.data.seeds import Key
from halfstep_train.report.results import Cell
from halfstep_train.workloads.base.sheets import Array, arrange_grid
from halfstep_train.workloads.base.using import EvaluateRequest, LookAt, PlainEvaluation, use_all_pictures
from halfstep_train.workloads.base.workload import Workload
from halfstep_train.workloads.diffusion.build import DiffusionForward
from halfstep_train.workloads.diffusion.config import DiffusionConfig
from halfstep_train.workloads.diffusion.data import to_bytes
from halfstep_train.workloads.diffusion.sampling import ImageSampler
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
        shown = min(SHOWN, len(self.workload.val_samples))
        pairs = [look(k * len(self.workload.val_samples) // shown) for k in range(shown)]
        images = [batch["image"] for batch, _ in pairs] + [outputs["image"] for _, outputs in pairs]
        path = folder / "reconstructions.png"
        Image.fromarray(arrange_grid(to_bytes(torch.cat(images)).numpy(), columns=shown)).save(path)
        return [path]
