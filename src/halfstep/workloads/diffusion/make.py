"""A trained model at work: images of a seed, in batches of any size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.data import noise
from halfstep.models.diffusers_nets import decoded
from halfstep.workloads.diffusion.config import DiffusionConfig
from halfstep.workloads.diffusion.data import to_bytes
from halfstep.workloads.diffusion.networks import Parts
from halfstep.workloads.diffusion.noising import schedule_of
from halfstep.workloads.diffusion.pictures import Array, grid, path_picture
from halfstep.workloads.diffusion.sampling import Sampler, check_steps, denoised, guided, scheduler_of
from halfstep.workloads.vae_format import computing_in
from halfstep.workloads.workload import Batch

PATH_IMAGES, PATH_STATES, DECODED_AT_ONCE = 4, 8, 8


class Maker:
    """Makes images with a U-Net, its conditions and its VAE."""

    def __init__(self, config: DiffusionConfig, parts: Parts, store: Mapping[str, Any]) -> None:
        self.config, self.parts, self.schedule = config, parts, schedule_of(config)
        self._form = str(store.get("vae_format", ""))
        """Of a VAE that is not a frozen part, since latents come from disk: it is on the device while it decodes."""

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
        found, path = self._usual_images(model, key, self.config.sample.num, kept=PATH_STATES)
        return {
            "samples": grid(found.numpy()),
            "path": path_picture([state.numpy() for state in (*path, found[:PATH_IMAGES])]),
        }

    def usual_images(self, model: nn.Module, key: tuple[int, ...], num: int) -> Tensor:
        """Samples with the config's settings: classes in turn, no words."""
        return self._usual_images(model, key, num)[0]

    def decoded_means(self, means: Tensor) -> Tensor:
        """Bytes of pictures, of the means of their latents."""
        vae = self.parts.vae
        assert vae is not None
        return self._shown((means.float() - (vae.config.shift_factor or 0.0)) * vae.config.scaling_factor)

    def _usual_images(
        self, model: nn.Module, key: tuple[int, ...], num: int, kept: int = 0
    ) -> tuple[Tensor, list[Tensor]]:
        wish, device = self.config.sample, next(model.parameters()).device
        return self.images(
            model,
            self._usual(num, device),
            key=key,
            num=num,
            device=device,
            steps=wish.steps,
            sampler=wish.sampler,
            guidance=wish.guidance,
            kept=kept,
        )

    def _usual(self, num: int, device: torch.device) -> Batch:
        told = self.parts.conditions.nothing(num, device)
        if "label" in told:
            told["label"] = torch.arange(num, device=device) % (self.parts.conditions.num_classes - 1)
        return told

    def _shown(self, samples: Tensor) -> Tensor:
        if self.parts.vae is None:
            return to_bytes(samples)
        vae = self.parts.vae.to(samples.device)
        with torch.no_grad(), computing_in(self._form, samples.device):
            images = to_bytes(torch.cat([decoded(vae, part) for part in samples.split(DECODED_AT_ONCE)]))
        if self._form:
            vae.to("cpu")
        return images
