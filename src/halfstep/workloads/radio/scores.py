"""How close a radio map is to the true one: maps (B, 1, H, W) in 0..1, scores a map, in float64.

`nmse` is RadioDiff's: the error's mean square over the mean square of the true map. `nmse_variance` divides by the
variance of the true map instead, as some papers do; the two must not be compared. SSIM has a Gaussian window of 11
pixels (sigma 1.5), SSIM and PSNR a range of 1: without one they follow the data, and numbers cannot be compared.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from halfstep.workloads.base.sums import Sums

WINDOW, SIGMA = 11, 1.5
SMALLEST_MSE = 1e-12
"""PSNR of a perfect map is 120 dB, so that a mean over maps stays a number."""
SCORES = ("nmse", "nmse_variance", "rmse", "ssim", "psnr")
SCORING = (
    "means over maps in 0..1, float64; nmse: mean square of the error / mean square of the true map (nmse_variance: "
    "/ its variance); ssim: 11-pixel Gaussian window; ssim and psnr: range 1"
)


def score_maps(predicted: Tensor, true: Tensor) -> dict[str, Tensor]:
    """Scores (B). Those that divide by a true map of nothing are NaN."""
    predicted, true = predicted.double(), true.double()
    mse = (predicted - true).square().flatten(1).mean(1)
    flat = true.flatten(1)
    return {
        "nmse": mse / flat.square().mean(1),
        "nmse_variance": mse / flat.var(1, correction=0),
        "rmse": mse.sqrt(),
        "ssim": ssim(predicted, true),
        "psnr": -10 * mse.clamp(min=SMALLEST_MSE).log10(),
    }


def ssim(one: Tensor, other: Tensor) -> Tensor:
    """(B), after Wang et al. 2004; the map goes on as its mirror image, as torchmetrics has it."""
    if min(one.shape[-2:]) <= WINDOW // 2:
        return torch.full((len(one),), float("nan"), dtype=one.dtype, device=one.device)
    places = torch.arange(WINDOW, dtype=one.dtype, device=one.device) - WINDOW // 2
    weights = torch.exp(-(places**2) / (2 * SIGMA**2))
    weights = weights / weights.sum()
    stacked = torch.cat([one, other, one * one, other * other, one * other], dim=1)
    stacked = F.pad(stacked, [WINDOW // 2] * 4, mode="reflect")
    kernel = weights.expand(stacked.shape[1], 1, 1, -1)
    blurred = F.conv2d(stacked, kernel, groups=stacked.shape[1])
    blurred = F.conv2d(blurred, kernel.transpose(2, 3), groups=stacked.shape[1])
    a, b, aa, bb, ab = blurred.chunk(5, dim=1)
    c1, c2 = 0.01**2, 0.03**2
    var_a, var_b, both = (aa - a * a).clamp(min=0), (bb - b * b).clamp(min=0), ab - a * b
    found = (2 * a * b + c1) * (2 * both + c2) / ((a * a + b * b + c1) * (var_a + var_b + c2))
    return found.flatten(1).mean(1)


class RadioMetrics(Sums):
    """Sums of scores over maps, on the device.

    Finished maps (`outputs["map"]` against `batch["truth"]`) are there in validation; in training there are errors of
    the prediction itself, one for each sample, as `outputs["error_NAME"]`. A score that a true map does not have (its
    share of nothing) is left out of the mean; what a broken model says is not.
    """

    def update(self, outputs: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> None:
        for name, errors in outputs.items():
            if name.startswith("error_"):
                self._add_mean(name.removeprefix("error_"), errors.double(), torch.ones_like(errors, dtype=torch.bool))
        if "map" in outputs:
            self.count(outputs["map"], batch["truth"])

    def count(self, predicted: Tensor, true: Tensor) -> dict[str, Tensor]:
        """Maps (B, 1, H, W) in 0..1; gives their scores."""
        found, flat = score_maps(predicted, true), true.flatten(1)
        for name, scores in found.items():
            has_score = torch.ones(len(true), dtype=torch.bool, device=true.device)
            if name == "nmse":
                has_score = (flat != 0).any(1)
            elif name == "nmse_variance":
                has_score = (flat != flat[:, :1]).any(1)
            self._add_mean(name, scores, has_score)
        return found

    def _add_mean(self, name: str, values: Tensor, counts: Tensor) -> None:
        self.add(**{f"sum.{name}": torch.where(counts, values, 0).sum(), f"count.{name}": counts.sum()})

    def compute(self) -> dict[str, float]:
        """Means; waits for the device."""
        counts = {name[6:]: int(count) for name, count in self.sums.items() if name.startswith("count.")}
        return {name: float(self.sums[f"sum.{name}"]) / count for name, count in counts.items() if count}
