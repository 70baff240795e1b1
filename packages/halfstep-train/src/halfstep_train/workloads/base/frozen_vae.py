"""VAEs: the format of a frozen one, its latents on disk, and training.

The format is as requested, or the half format with the smaller round-trip error on samples. Latents on disk are mean
and log-variance ("moments") of every sample, from which each epoch draws new latents. One file (see cache_file.py)
holds `moments` (N, F, 2C, h, w) in fp32, row by row; F is 2 if mirror images were encoded too, else 1. The index holds
their shape.
"""

from __future__ import annotations

import copy
import hashlib
import math
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from halfstep.errors import ConfigError, DataError, ModelError
from halfstep.islands import fp32_island, in_fp32
from halfstep_train.config.schema import RunConfig
from halfstep_train.data import noise
from halfstep_train.data.cache_file import CacheWriter, fingerprint_files, open_or_write
from halfstep_train.data.image_samples import draw_uniform, gather_images, take_first
from halfstep_train.data.loader import FileSamples, NamedSamples, Samples, implements, name_sample
from halfstep_train.models.patch_gan import PatchGan
from halfstep_train.models.posterior import Codec, draw_latent, split_moments
from halfstep_train.report.run_report import PackingBar
from halfstep_train.workloads.base.over_ranks import average_over_ranks
from halfstep_train.workloads.base.workload import Batch, Phase, Scheduled, Workload

HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}
LARGEST_ERROR = 0.02
"""Largest round-trip error of a half format, relative to the standard deviation of the fp32 pixels; above it the VAE
stays in fp32."""
RoundTrip = Callable[[Any, Tensor], Tensor]
"""(vae, images) -> the images, encoded and decoded again."""


def pick_training_device(config: RunConfig) -> torch.device:
    """Return the device on which to try the VAE and encode samples; this happens before the precision plan exists."""
    if config.device != "auto":
        return torch.device(config.device)
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def choose_vae_format(
    config: RunConfig, vae: Any, trip: RoundTrip, images: Callable[[], Tensor], requested: str
) -> tuple[str, str]:
    """Choose the format for `precision.modules: {vae: requested}` by trying real samples on the device that will train;
    refuse one that overflows. Return its name, and the reason."""
    precision, device = config.precision, pick_training_device(config)
    # TF32 is one switch for the whole process: a run that uses it cannot keep one module in fp32.
    whole = "tf32" if precision.default == "tf32" else "fp32"
    if requested not in ("auto", *HALF):
        return requested, "requested"
    if requested == "auto" and device.type == "cpu" and not precision.simulate:
        return whole, "auto: no half format is fast on a CPU"
    tried = images().to(device)
    errors = measure_round_trips(vae, trip, tried, tuple(HALF) if requested == "auto" else (requested,))
    finite = {name: error for name, error in errors.items() if error is not None}
    if requested != "auto" and not finite:
        raise ConfigError(
            f"precision.modules: {{vae: {requested}}} overflows",
            why=f"the VAE gives NaN or infinity for {len(tried)} of your samples in {requested}, but not in fp32",
            fix="set precision.modules={vae: auto}, or bf16 or fp32 instead of auto",
        )
    measured = ", ".join(f"{name} {'overflows' if e is None else f'{e:.2%}'}" for name, e in errors.items())
    if requested != "auto":
        return requested, f"requested, encode-decode error: {measured}"
    best = min(finite, key=lambda name: finite[name], default="")
    if not best or finite[best] > LARGEST_ERROR:
        return whole, f"auto: no half format stays below {LARGEST_ERROR:.0%} ({measured})"
    return best, f"chosen by auto, smallest encode-decode error ({measured})"


def measure_round_trips(vae: Any, trip: RoundTrip, images: Tensor, formats: tuple[str, ...]) -> dict[str, float | None]:
    """Return each format's RMS round-trip error against fp32, divided by the pixels' standard deviation; None: not
    finite."""
    vae = copy.deepcopy(vae).to(images.device)
    exact = _run_in_format(vae, trip, images, "fp32")
    if not bool(exact.isfinite().all()):
        raise ModelError("the VAE gives NaN or infinity for your samples in fp32", fix="use another VAE: model.vae=DIR")
    spread = float((exact - exact.mean()).square().mean().sqrt()) or 1.0
    errors: dict[str, float | None] = {}
    for name in formats:
        found = _run_in_format(vae, trip, images, name)
        error = float((found - exact).square().mean().sqrt()) / spread
        errors[name] = error if bool(found.isfinite().all()) else None
    return errors


@torch.no_grad()
def _run_in_format(vae: Any, trip: RoundTrip, images: Tensor, format_name: str) -> Tensor:
    """Return the round trip in a format. The oneDNN switch stays as it was."""
    onednn = torch._C._get_mkldnn_enabled()
    with use_format(format_name, images.device), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "mkldnn_matmul failed")  # CPUs without native bf16
        try:
            return trip(vae, images).float()
        finally:
            # After that failure torch disables oneDNN for the rest of the process. A resumed run does not try formats
            # and would keep oneDNN on, so its results would differ.
            torch._C._set_mkldnn_enabled(onednn)


def use_format(format_name: str, device: torch.device) -> AbstractContextManager[Any]:
    """Return a context that computes as frozen modules do during a run: autocast, with norms in fp32."""
    if format_name not in HALF:
        return fp32_island()
    return torch.autocast(device.type, dtype=HALF[format_name])


# --- latents on disk ---

LATENTS, MOMENTS = "file of latents", "moments"
BYTES = 4
"""Per number: fp32."""
ENCODED_AT_ONCE = 8
"""Images per call of the VAE."""


class LatentDraws:
    """Draw the latents that a diffusion model trains on: shifted and scaled, in fp32, without gradients."""

    def __init__(self, vae: Any, codec: Codec, *, scale: float, shift: float = 0.0) -> None:
        self.vae, self.codec, self.scale, self.shift = vae, codec, scale, shift

    def __call__(self, batch: Batch) -> Tensor:
        """Use the batch's `moments` if they come from disk, else encode its `image`."""
        with torch.no_grad(), fp32_island():
            mean, logvar = (
                split_moments(batch[MOMENTS]) if MOMENTS in batch else self.codec.encode(self.vae, batch["image"])
            )
        return (draw_latent(mean, logvar, batch["posterior_noise"]) - self.shift) * self.scale


def open_or_encode(
    config: RunConfig,
    root: Path,
    samples: Sequence[Samples],
    files: Sequence[Sequence[Path]],
    column: str,
    to_images: Callable[[Tensor], Tensor],
    vae: Any,
    codec: Codec,
    *,
    format: str = "fp32",
    flips: bool = False,
    **settings: Any,
) -> LatentCache:
    """Open the file of a data folder's latents, which is written if none matches.

    The file has one row for each of the `samples` of each split, in their order. If one of their `files` or another
    argument changes, the latents are rebuilt. `column` is the tensor of a sample that holds the image; `to_images`
    converts it, as loaded, to the VAE's input. With `flips`, mirror images are encoded as well; the latents depend on
    the further `settings`.
    """
    data: Any = config.data
    path = Path(data.cache_file or root / f".halfstep-latents-{data.image_size}.cache")
    made_with = {"size": data.image_size, "flips": flips, "vae": hash_weights(vae), "format": format, **settings}
    total, device = sum(map(len, samples)), pick_training_device(config)

    @torch.no_grad()
    def encode() -> Iterator[Tensor]:
        """Yield the moments (num, F, 2C, h, w) of a few samples at a time."""
        net, done = copy.deepcopy(vae).to(device).eval(), 0
        for part in samples:
            for start in range(0, len(part), ENCODED_AT_ONCE):
                indices = range(start, min(start + ENCODED_AT_ONCE, len(part)))
                loaded = torch.stack([part.sample(k, key=(0, 0, k))[column] for k in indices])
                images = to_images(loaded.to(device))
                with use_format(format, device):
                    views = [images, images.flip(-1)] if flips else [images]
                    moments = torch.stack([torch.cat(codec.encode(net, view), dim=1) for view in views], dim=1)
                if not bool(moments.isfinite().all()):
                    another = "another VAE: model.vae" if format == "fp32" else "precision.modules={vae: fp32}"
                    raise ConfigError(
                        f"the VAE gives NaN or infinity in {format} for {name_sample(part, start)} or one of the "
                        f"{len(indices) - 1} images after it",
                        fix=f"{another}, or leave the file out",
                    )
                done += len(indices)
                bar(done, total)
                yield moments

    with PackingBar(path) as bar:
        return open_or_write_latents(path, fingerprint_files(root, files, made_with), total, encode)


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentCache:
    """An opened file of latents."""

    path: Path
    moments: Tensor
    """(N, F, 2C, h, w), memory-mapped."""
    checksum: str
    is_new: bool
    """Whether the file was written just now, because none matched."""


def open_or_write_latents(
    path: Path, made_from: str, num: int, make_rows: Callable[[], Iterator[Tensor]]
) -> LatentCache:
    """Open the file if it was made from the same, else write `num` rows, given in batches."""

    def write(file: CacheWriter) -> None:
        for batch in make_rows():
            if not file.num_bytes:
                file.index = {"shape": [num, *batch.shape[1:]]}
            file.write(batch.detach().to("cpu", torch.float32).contiguous().numpy().tobytes())
        assert file.num_bytes == math.prod(file.index["shape"]) * BYTES, (file.num_bytes, file.index)

    # Every number is verified, since the checksum of a run's latents is computed from the stored ones.
    file, is_new = open_or_write(path, LATENTS, made_from, write, verify_bytes=sys.maxsize)
    moments = torch.from_numpy(file.map(np.float32, tuple(file.index["shape"])))
    return LatentCache(path=path, moments=moments, checksum=file.checksum, is_new=is_new)


def describe_resume(cache: LatentCache, stored: str) -> str:
    """Return a remark for the run's header if the latents differ from those it was trained on (`stored` is their
    SHA-256).

    Refuse them unless the file was rebuilt just now."""
    if stored in ("", cache.checksum):
        return ""
    if not cache.is_new:
        raise DataError(
            f"{cache.path} contains different latents from those the run was trained on",
            why=f"SHA-256 {cache.checksum[:12]}… instead of {stored[:12]}…",
            fix="restore the file, or delete it: it is rebuilt, and the run continues, but not bit-exactly",
        )
    return "; rebuilt with different values: from here on, the run is not an exact continuation"


def hash_weights(net: Any) -> str:
    """Return the SHA-256 of a network's weights."""
    digest = hashlib.sha256()
    for name, tensor in sorted(net.state_dict().items()):
        digest.update(name.encode() + tensor.detach().cpu().float().contiguous().numpy().tobytes())
    return digest.hexdigest()


class CachedLatents:
    """Samples from a file of latents: the `moments` (2C, h, w) of an image or, with probability `flip`, of its mirror
    image."""

    def __init__(self, moments: Tensor, *, flip: float = 0.0, extra: Mapping[str, Tensor] | None = None) -> None:
        self.moments, self.flip, self.extra = moments, flip if moments.shape[1] > 1 else 0.0, dict(extra or {})

    def __len__(self) -> int:
        return len(self.moments)

    def sample(self, index: int, *, key: tuple[int, int, int]) -> dict[str, Tensor]:
        return take_first(self.make_batch(torch.tensor([index]), seed=key[0], epoch=key[1]))

    def make_batch(self, indices: Tensor, *, seed: int, epoch: int) -> dict[str, Tensor]:
        """Return several samples at once, each equal to what `sample` returns."""
        num, views = self.moments.shape[:2]
        is_mirrored = draw_uniform(seed, epoch, indices.numpy(), count=1)[:, 0] < self.flip
        # Rows of the file are (sample, view); view 1 is the mirror image.
        positions = indices * views + torch.from_numpy(is_mirrored).long()
        rows = gather_images(self.moments.view(num * views, *self.moments.shape[2:]), positions)
        return {MOMENTS: rows} | {name: values[indices] for name, values in self.extra.items()}


class WithColumn:
    """Samples with one more tensor, such as the tokens of a caption, or moments from a file."""

    def __init__(self, samples: Samples, name: str, values: Tensor) -> None:
        self.samples, self.name, self.values = samples, name, values

    def __len__(self) -> int:
        return len(self.samples)

    def sample(self, index: int, *, key: tuple[int, int, int]) -> dict[str, Tensor]:
        return self.samples.sample(index, key=key) | {self.name: self.values[index].clone()}

    def name_of(self, index: int) -> str:
        return self.samples.name_of(index) if implements(self.samples, NamedSamples) else ""

    def files(self) -> Iterable[Path]:
        return self.samples.files() if implements(self.samples, FileSamples) else ()


# --- training of a VAE ---
#
# The model holds an autoencoder, `vae`, and optionally a `discriminator`; then each trains in its own phase. The loss
# of the VAE's phase computes gradients itself, for the weight that balances reconstruction and discriminator, so it is
# not compiled; the discriminator's phase is.


LARGEST_WEIGHT = 1e4
"""Upper limit of the adaptive weight, as in taming-transformers."""
SMALLEST_NORM = 1e-4
"""Added to the norm of the discriminator's gradient, which can be 0."""
Outputs = Mapping[str, Tensor]


class VaeNet(nn.Module):
    """A VAE and, for training, the discriminator that judges its reconstructions."""

    def __init__(self, vae: Any, codec: Codec, discriminator: PatchGan | None = None) -> None:
        super().__init__()
        self.vae, self.codec, self.discriminator = vae, codec, discriminator

    def forward(self, image: Tensor, posterior_noise: Tensor) -> dict[str, Tensor]:
        """Return the reconstructed `image`, the drawn `latent` and its `kl` divergence."""
        return self.codec.reconstruct(self.vae, image, posterior_noise)

    def decode_means(self, image: Tensor) -> Tensor:
        """Return reconstructions from the means of the latents, without random draws."""
        return self.codec.decode_means(self.vae, image)


@dataclass(frozen=True, kw_only=True, slots=True)
class Critic:
    """Settings for training against a discriminator."""

    start: int
    """First step in which it trains and contributes to the VAE's loss."""
    weight: float
    scales: tuple[float, float]
    """Factors applied to reconstruction and adversarial loss while their gradients are compared
    (`compute_adaptive_weight`)."""


class VaeTrainer:
    """Training of a VaeNet. A family subclasses it and defines `make_images` and `score`."""

    def __init__(
        self, *, phase: str, latent_shape: tuple[int, ...], kl_weight: float, critic: Critic | None = None
    ) -> None:
        self.phase, self.latent_shape, self.kl_weight, self.critic = phase, latent_shape, kl_weight, critic
        self.gan_on = Scheduled(lambda step: float(critic is not None and step >= critic.start))

    def make_images(self, batch: Batch, *, key: tuple[int, ...], training: bool) -> Batch:
        """Convert a batch as loaded; the result holds at least `image` (N, channels, H, W) in -1..1."""
        raise NotImplementedError

    def score(self, outputs: Outputs, batch: Batch) -> Tensor:
        """Return the reconstruction loss, a scalar in fp32."""
        raise NotImplementedError

    def build_workload(self, model: VaeNet, **settings: Any) -> Workload:
        """Return a Workload that trains a VaeNet; `settings` are further fields of it."""
        return Workload(
            model=model,
            prepare=self.prepare,
            forward=self.forward,
            loss=self.compute_loss,
            phases=self.make_phases(),
            values={"gan": self.gan_on} if self.critic else {},
            ema_parts=("vae",),
            **settings,
        )

    def prepare(self, batch: Batch, *, key: tuple[int, ...], training: bool) -> Batch:
        made = self.make_images(batch, key=key, training=training)
        num, device = len(made["image"]), made["image"].device
        made["posterior_noise"] = noise.normal(key, num, self.latent_shape, device, stream="posterior")
        return batch | made

    def forward(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        found: dict[str, Tensor] = model(batch["image"], batch["posterior_noise"])
        if self.critic is None or not model.training:
            return found
        net = cast(Any, model)
        # Before the discriminator starts, no gradient of it may reach the VAE. Multiplying by 0 would let inf and NaN
        # through; selecting the detached image does not.
        seen = torch.where(self.gan_on.value > 0, found["image"], found["image"].detach())
        # The last layer is where both losses' gradients are compared.
        return found | {"fake": net.discriminator(seen), "last_layer": net.vae.decoder.conv_out.weight}

    def compute_loss(self, outputs: Outputs, batch: Batch) -> tuple[Tensor, float]:
        """Return the loss without the discriminator, which validation reports, and the number of images."""
        return self._add_kl(self.score(outputs, batch), outputs), len(batch["image"])

    def compute_loss_with_critic(self, outputs: Outputs, batch: Batch) -> tuple[Tensor, float]:
        """Return reconstruction + KL + weighted adversarial loss, and the number of images."""
        critic = self.critic
        assert critic is not None
        score = self.score(outputs, batch)
        adversarial = hinge_generator_loss(outputs["fake"])
        balance = compute_adaptive_weight(score, adversarial, outputs["last_layer"], scales=critic.scales)
        with fp32_island():
            term = torch.where(self.gan_on.value > 0, critic.weight * balance * adversarial, 0.0)
        return self._add_kl(score, outputs) + term, len(batch["image"])

    def _add_kl(self, score: Tensor, outputs: Outputs) -> Tensor:
        """Return the reconstruction loss plus the weighted KL divergence."""
        with fp32_island():
            return score + self.kl_weight * outputs["kl"].mean()

    def make_phases(self) -> tuple[Phase, ...]:
        """Return the phases; none without a discriminator: the workload's forward and loss then train the VAE."""
        if self.critic is None:
            return ()
        return (
            Phase(name=self.phase, parameters=("vae",), loss=self.compute_loss_with_critic, compiles=False),
            Phase(
                name="discriminator",
                parameters=("discriminator",),
                forward=judge_both,
                loss=compute_discriminator_loss,
                from_step=self.critic.start,
            ),
        )


def judge_both(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """Return the discriminator's logits for images and their reconstructions, without gradients for the VAE."""
    with torch.no_grad():
        fake = model(batch["image"], batch["posterior_noise"])["image"]
    discriminator = cast(Any, model).discriminator
    return {"real": discriminator(batch["image"]), "fake": discriminator(fake)}


def compute_discriminator_loss(outputs: Outputs, batch: Batch) -> tuple[Tensor, float]:
    return hinge_discriminator_loss(outputs["real"], outputs["fake"]), len(outputs["real"])


@in_fp32
def hinge_discriminator_loss(real: Tensor, fake: Tensor) -> Tensor:
    """Return the hinge loss of the discriminator's logits, which may have any shape."""
    return 0.5 * (F.relu(1 - real).mean() + F.relu(1 + fake).mean())


@in_fp32
def hinge_generator_loss(fake: Tensor) -> Tensor:
    """Return the generator's hinge loss of the discriminator's logits."""
    return -fake.mean()


def compute_adaptive_weight(
    reconstruction: Tensor, adversarial: Tensor, last_layer: Tensor, *, scales: tuple[float, float]
) -> Tensor:
    """Return the ratio of both losses' gradient norms at the last layer, detached (Esser et al. 2021, eq. 7).

    Each loss is multiplied by its scale before its gradient is computed, and the norm is divided by it: in fp16 the
    gradient of a sum over pixels would overflow, and that of a mean over patches would underflow. The gradients are
    averaged over all ranks.
    """
    reconstruction_norm, adversarial_norm = (
        average_over_ranks(torch.autograd.grad(loss * scale, last_layer, retain_graph=True)[0].float()).norm() / scale
        for loss, scale in zip((reconstruction, adversarial), scales, strict=True)
    )
    weight: Tensor = reconstruction_norm / (adversarial_norm + SMALLEST_NORM)
    return weight.clamp(0, LARGEST_WEIGHT).detach()
