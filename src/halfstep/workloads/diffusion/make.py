"""A trained model at work: images of a seed, in batches of any size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.data import noise
from halfstep.data.seeds import Key
from halfstep.islands import fp32_island
from halfstep.models.diffusers_nets import decoded
from halfstep.workloads.diffusion.config import DiffusionConfig
from halfstep.workloads.diffusion.data import to_bytes
from halfstep.workloads.diffusion.networks import Parts
from halfstep.workloads.diffusion.noising import schedule_of
from halfstep.workloads.diffusion.pictures import Array, grid, path_picture
from halfstep.workloads.diffusion.sampling import Sampler, check_steps, denoised, guided, scheduler_of
from halfstep.workloads.workload import Batch

PATH_IMAGES, PATH_STATES = 4, 8
Tell = Callable[[int], None]


class Maker:
    """Makes images with a U-Net, its conditions and its VAE."""

    def __init__(
        self, config: DiffusionConfig, parts: Parts, *, vae: Callable[[torch.device], Any] | None = None
    ) -> None:
        self.config, self.parts, self.schedule = config, parts, schedule_of(config)
        self._vae = vae or (lambda device: parts.vae)

    def images(
        self,
        model: nn.Module,
        told: Batch,
        *,
        key: tuple[int, ...],
        num: int,
        device: torch.device,
        steps: int,
        sampler: Sampler,
        guidance: float,
        kept: int = 0,
    ) -> tuple[Tensor, list[Tensor]]:
        """Bytes (N, H, W, 3), and some states on the way."""
        check_steps(steps, self.schedule)
        start = noise.normal(key, num, self.parts.shape, device, stream="start")
        scheduler = scheduler_of(sampler, self.schedule, self.config.model.target, clips=self.parts.vae is None)
        denoise = guided(model, self.parts.conditions, told, guidance)
        found, path = denoised(denoise, scheduler, start, steps, kept)
        return self._shown(found), [self._shown(state[:PATH_IMAGES]) for state in path]

    def sheet(self, model: nn.Module, key: tuple[int, ...]) -> dict[str, Array]:
        """The grid of samples and the picture of their way, as training shows them."""
        wish, device = self.config.sample, next(model.parameters()).device
        found, path = self.images(
            model,
            self._usual(wish.num, device),
            key=key,
            num=wish.num,
            device=device,
            steps=wish.steps,
            sampler=wish.sampler,
            guidance=wish.guidance,
            kept=PATH_STATES,
        )
        return {
            "samples": grid(found.numpy()),
            "path": path_picture([state.numpy() for state in (*path, found[:PATH_IMAGES])]),
        }

    def _usual(self, num: int, device: torch.device) -> Batch:
        """Classes in turn; no words."""
        told = self.parts.conditions.nothing(num, device)
        if "label" in told:
            told["label"] = torch.arange(num, device=device) % (self.parts.conditions.num_classes - 1)
        return told

    def _shown(self, samples: Tensor) -> Tensor:
        if self.parts.vae is None:
            return to_bytes(samples)
        vae = self._vae(samples.device)
        with torch.no_grad(), fp32_island():
            return to_bytes(torch.cat([decoded(vae, part) for part in samples.split(8)]))


def sampling_key(seed: int, place: int) -> Key:
    return Key.of_sampling(seed, place)
