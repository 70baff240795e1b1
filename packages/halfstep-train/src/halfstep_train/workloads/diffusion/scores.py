"""Losses and metrics of diffusion models and of the VAE."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from halfstep.islands import fp32_island, to_fp32
from halfstep_train.workloads.base.sums import Sums
from halfstep_train.workloads.diffusion.noise_schedule import NUM_BUCKETS, list_bucket_names

Outputs = Mapping[str, Tensor]


def measure_squared_errors(outputs: Outputs) -> Tensor:
    """Return the mean squared error (N,) of each prediction, in fp32."""
    with fp32_island():
        difference = to_fp32(outputs["prediction"]) - outputs["target"]
        return difference.square().flatten(1).mean(1)


def denoising_loss(outputs: Outputs, batch: Mapping[str, Tensor]) -> tuple[Tensor, float]:
    """Return the squared error, weighted by timestep and averaged over samples, and the number of samples."""
    errors = measure_squared_errors(outputs)
    with fp32_island():
        return (errors * batch["loss_weight"]).mean(), len(errors)


class DenoisingMetrics(Sums):
    """Unweighted mean squared errors, over all timesteps and in each bucket of timesteps."""

    def __init__(self, num_steps: int) -> None:
        self.num_steps = num_steps
        self.more: dict[str, float] = {}
        """Scores that are computed separately, such as FID."""
        self.sums = {"sums": torch.zeros(2, NUM_BUCKETS, dtype=torch.float64)}

    def update(self, outputs: Outputs, batch: Mapping[str, Tensor]) -> None:
        """Add the errors of one batch, without waiting for the device."""
        errors = measure_squared_errors(outputs).double()
        # Row 0 sums errors and row 1 counts samples, one column per bucket.
        bucket = batch["timestep"] * NUM_BUCKETS // self.num_steps
        self.sums["sums"] = self.sums["sums"].to(errors.device)
        self.sums["sums"].scatter_add_(1, bucket.expand(2, -1), torch.stack([errors, torch.ones_like(errors)]))

    def compute(self) -> dict[str, float]:
        """Return `mse`, and `mse/FIRST-LAST` of each bucket with samples; waits for the device."""
        errors, counts = self.sums["sums"].tolist()
        if not sum(counts):
            return {}
        by_bucket = {
            f"mse/{name}": error / count
            for name, error, count in zip(list_bucket_names(self.num_steps), errors, counts, strict=True)
            if count
        }
        return {"mse": sum(errors) / sum(counts)} | by_bucket | self.more


class ReconstructionMetrics(Sums):
    """Errors of reconstructions, KL divergence, and the standard deviation of latents."""

    def update(self, outputs: Outputs, batch: Mapping[str, Tensor]) -> None:
        """Add the errors of one batch, without waiting for the device. Values are clipped to -1..1, as for display."""
        difference = to_fp32(outputs["image"]).clamp(-1, 1).double() - batch["image"].double()
        latent = outputs["latent"].double()
        self.add_mean("l1", difference.abs())
        self.add_mean("mse", difference.square())
        self.add_mean("kl", outputs["kl"])
        self.add_mean("latent", latent)
        self.add_mean("latent_squared", latent.square())

    def compute(self) -> dict[str, float]:
        """Return `psnr` in dB, `l1` and `mse` of values in -1..1, `kl` per latent, `latent_std`; waits for the
        device."""
        if not self.sums:
            return {}
        found = super().compute()
        return {
            # PSNR = 10 log10(peak² / mse); the range -1..1 has a peak-to-peak value of 2.
            "psnr": 10 * math.log10(4 / found["mse"]) if found["mse"] > 0 else math.inf,
            "l1": found["l1"],
            "mse": found["mse"],
            "kl": found["kl"],
            # Rounding can make E[x²] - E[x]² slightly negative.
            "latent_std": math.sqrt(max(0.0, found["latent_squared"] - found["latent"] ** 2)),
        }
