"""How close a radio map is to the true one: maps (B, 1, H, W) in 0..1, scores a map, in float64.

`nmse` is RadioDiff's: the error's mean square over the mean square of the true map. `nmse_variance` divides by the
variance of the true map instead, as some papers do; the two must not be compared. SSIM has a Gaussian window of 11
pixels (sigma 1.5), SSIM and PSNR a range of 1: without one they follow the data, and numbers stop being comparable.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

WINDOW, SIGMA = 11, 1.5
SMALLEST_MSE = 1e-12
"""PSNR of a perfect map is 120 dB, so that a mean over maps stays a number."""
SCORES = ("nmse", "nmse_variance", "rmse", "ssim", "psnr")
SCORING = (
    "means over maps in 0..1, float64; nmse: mean square of the error / mean square of the true map (nmse_variance: "
    "/ its variance); ssim: 11-pixel Gaussian window; ssim and psnr: range 1"
)


def map_scores(predicted: Tensor, true: Tensor) -> dict[str, Tensor]:
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
    """(B), after Wang et al. 2004, over windows that lie inside the map."""
    if min(one.shape[-2:]) < WINDOW:
        return torch.full((len(one),), float("nan"), dtype=one.dtype, device=one.device)
    places = torch.arange(WINDOW, dtype=one.dtype, device=one.device) - WINDOW // 2
    weights = torch.exp(-(places**2) / (2 * SIGMA**2))
    weights = weights / weights.sum()
    stacked = torch.cat([one, other, one * one, other * other, one * other], dim=1)
    kernel = weights.expand(stacked.shape[1], 1, 1, -1)
    blurred = F.conv2d(stacked, kernel, groups=stacked.shape[1])
    blurred = F.conv2d(blurred, kernel.transpose(2, 3), groups=stacked.shape[1])
    a, b, aa, bb, ab = blurred.chunk(5, dim=1)
    c1, c2 = 0.01**2, 0.03**2
    var_a, var_b, both = (aa - a * a).clamp(min=0), (bb - b * b).clamp(min=0), ab - a * b
    found = (2 * a * b + c1) * (2 * both + c2) / ((a * a + b * b + c1) * (var_a + var_b + c2))
    return found.flatten(1).mean(1)


class RadioMetrics:
    """Sums of scores over maps, on the device; `outputs["map"]` against `batch["truth"]`.

    In training there is no finished map, and errors of the prediction itself (`outputs["errors"]`) are all there is.
    """

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._counts: dict[str, Tensor] = {}

    def update(self, outputs: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> None:
        found = {name.removeprefix("error_"): value for name, value in outputs.items() if name.startswith("error_")}
        if "map" in outputs:
            found |= map_scores(outputs["map"], batch["truth"])
        for name, scores in found.items():
            usable = scores.isfinite()
            self._add(name, torch.where(usable, scores.double(), 0).sum(), usable.sum())

    def _add(self, name: str, total: Tensor, count: Tensor) -> None:
        if name not in self._sums:
            self._sums[name], self._counts[name] = torch.zeros_like(total), torch.zeros_like(count)
        self._sums[name] = self._sums[name].to(total.device) + total
        self._counts[name] = self._counts[name].to(count.device) + count

    def compute(self) -> dict[str, float]:
        """Means over the maps that have the score; waits for the device."""
        return {
            name: float(total) / int(self._counts[name]) if int(self._counts[name]) else float("nan")
            for name, total in self._sums.items()
        }

    def state_dict(self) -> dict[str, Tensor]:
        sums = {f"sum.{name}": value for name, value in self._sums.items()}
        return sums | {f"count.{name}": value for name, value in self._counts.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self._sums = {name[4:]: value for name, value in state.items() if name.startswith("sum.")}
        self._counts = {name[6:]: value for name, value in state.items() if name.startswith("count.")}
