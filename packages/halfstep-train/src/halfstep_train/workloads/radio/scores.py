"""Scores of radio maps (B, 1, H, W) in 0..1 against the truth: one value per map, in float64.

`nmse` is RadioDiff's: the mean square of the error over the mean square of the true map. `nmse_variance` divides by the
variance of the true map instead, as some papers do; the two are not comparable. SSIM has a Gaussian window of 11 pixels
(sigma 1.5). SSIM and PSNR use a fixed range of 1: with a range taken from the data, scores could not be compared.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from halfstep_train.workloads.base.sums import Sums

WINDOW, SIGMA = 11, 1.5
SMALLEST_MSE = 1e-12
"""Limits the PSNR of a perfect map to 120 dB, so that the mean over maps stays finite."""
SCORES = ("nmse", "nmse_variance", "rmse", "ssim", "psnr")
SCORING = (
    "means over maps in 0..1, float64; nmse: mean square of the error / mean square of the true map (nmse_variance: "
    "/ its variance); ssim: 11-pixel Gaussian window; ssim and psnr: range 1"
)


def score_maps(predicted: Tensor, true: Tensor) -> dict[str, Tensor]:
    """Return scores (B,) by name; NaN or infinity where the true map is all zero and would be divided by."""
    predicted, true = predicted.double(), true.double()
    mse = (predicted - true).square().flatten(1).mean(1)
    flat = true.flatten(1)
    return {
        "nmse": mse / flat.square().mean(1),
        "nmse_variance": mse / flat.var(1, correction=0),
        "rmse": mse.sqrt(),
        "ssim": ssim(predicted, true),
        # The range is 1, so PSNR = 10 log10(1 / mse); the clamp keeps perfect maps finite.
        "psnr": -10 * mse.clamp(min=SMALLEST_MSE).log10(),
    }


def ssim(one: Tensor, other: Tensor) -> Tensor:
    """Return SSIM (B,) after Wang et al. 2004, with reflection padding as in torchmetrics."""
    # Reflection padding needs more pixels than it adds; SSIM of smaller maps is undefined.
    if min(one.shape[-2:]) <= WINDOW // 2:
        return torch.full((len(one),), float("nan"), dtype=one.dtype, device=one.device)
    offsets = torch.arange(WINDOW, dtype=one.dtype, device=one.device) - WINDOW // 2
    weights = torch.exp(-(offsets**2) / (2 * SIGMA**2))
    weights = weights / weights.sum()
    # One separable Gaussian blur gives all five local moments: E[a], E[b], E[a²], E[b²], E[ab].
    stacked = torch.cat([one, other, one * one, other * other, one * other], dim=1)
    stacked = F.pad(stacked, [WINDOW // 2] * 4, mode="reflect")
    kernel = weights.expand(stacked.shape[1], 1, 1, -1)
    blurred = F.conv2d(stacked, kernel, groups=stacked.shape[1])
    blurred = F.conv2d(blurred, kernel.transpose(2, 3), groups=stacked.shape[1])
    a, b, aa, bb, ab = blurred.chunk(5, dim=1)
    # (K1 L)² and (K2 L)² of Wang et al. with range L = 1.
    c1, c2 = 0.01**2, 0.03**2
    var_a, var_b, both = (aa - a * a).clamp(min=0), (bb - b * b).clamp(min=0), ab - a * b
    found = (2 * a * b + c1) * (2 * both + c2) / ((a * a + b * b + c1) * (var_a + var_b + c2))
    return found.flatten(1).mean(1)


class RadioMetrics(Sums):
    """Sums of scores over maps, on the device.

    Validation scores finished maps (`outputs["map"]` against `batch["truth"]`). Training adds the errors of the
    network's predictions, one per sample (`outputs["error_NAME"]`). Maps whose score is undefined, such as all-zero
    ones, are left out of the mean; maps with non-finite predictions are not.
    """

    def update(self, outputs: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> None:
        for name, errors in outputs.items():
            if name.startswith("error_"):
                self.add_mean(name.removeprefix("error_"), errors)
        if "map" in outputs:
            self.add_maps(outputs["map"], batch)

    def add_maps(self, predicted: Tensor, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Score maps (B, 1, H, W) in 0..1, add the scores to the sums, and return them."""
        found, flat = score_maps(predicted, batch["truth"]), batch["truth"].flatten(1)
        has_score = {"nmse": (flat != 0).any(1), "nmse_variance": (flat != flat[:, :1]).any(1)}
        for name, scores in found.items():
            self.add_mean(name, scores, has_score.get(name))
        return found
