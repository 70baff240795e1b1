"""Exercise 3: what stays in fp32 and why. Repeat each computation in half precision and measure what breaks."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from halfstep_train.exercises import Claim, Story

HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}


Measured = tuple[tuple[str, ...], Claim]
"""A row of the table: a computation, its half format, what breaks, and its errors. The claim says why it breaks."""


def run() -> Story:
    """Measure each computation in fp32 and in a half format."""
    parts = [
        measure_softmax(),
        measure_layer_norm(),
        measure_dice(),
        measure_noise_schedule(),
        measure_master_weights(),
    ]
    return Story(
        title="Exercise 3: what stays in fp32, and why",
        titles=("part", "in half", "what breaks", "error fp32", "error half"),
        rows=[row for row, _ in parts],
        claims=[claim for _, claim in parts],
        comments=[
            "errors are relative to fp64; halfstep keeps these in fp32 in every precision: regions of the model as "
            "islands, and the weights that the optimizer updates"
        ],
    )


def measure_softmax() -> Measured:
    """Sum 4096 small terms: in bf16 the sum stops growing when a term is below half its spacing."""

    def compute_sums(logits: Tensor) -> Tensor:
        terms = (logits - logits.max(1, keepdim=True).values).exp()
        total = torch.zeros(len(terms), dtype=terms.dtype)
        for column in terms.unbind(1):  # as a kernel without a wider accumulator does
            total = total + column
        return total

    return _measure(
        "softmax sums",
        "bf16",
        compute_sums,
        torch.randn(8, 4096, generator=_make_generator(), dtype=torch.float64),
        describe=lambda found, exact: f"the sum over 4,096 terms is {_compute_error(found, exact):.0%} too small",
        why="a running sum in bf16 stops growing once a term is below half its spacing",
    )


def measure_layer_norm() -> Measured:
    """Compute a variance: squares of activations above 256 exceed fp16's largest number."""

    def compute_variance(values: Tensor) -> Tensor:
        centred = values - values.mean(1, keepdim=True)
        return (centred * centred).sum(1) / values.shape[1]

    return _measure(
        "variance of a norm",
        "fp16",
        compute_variance,
        torch.randn(4, 1024, generator=_make_generator(), dtype=torch.float64) * 400,
        describe=lambda found, _: f"{int(found.isinf().sum())} of {len(found)} variances are infinite",
        why="squares of activations above 256 exceed 65504, so the normalised output is 0",
    )


def measure_dice() -> Measured:
    """Compute Dice, which sums over all pixels of a batch."""

    def compute_dice(p: Tensor, m: Tensor) -> Tensor:
        inter, sets = (p * m).sum(dtype=p.dtype), p.sum(dtype=p.dtype) + m.sum(dtype=m.dtype)
        return 2 * inter / sets

    probabilities, draws = torch.rand(2, 4, 256, 256, generator=_make_generator(), dtype=torch.float64)
    return _measure(
        "Dice sums",
        "fp16",
        compute_dice,
        probabilities,
        (draws > 0.5).double(),
        describe=lambda found, exact: f"Dice is {float(found):g} instead of {float(exact):.4f}",
        why="a sum over 262,144 pixels exceeds 65504, and infinity divided by infinity is NaN",
    )


def measure_noise_schedule() -> Measured:
    """Compute the linear DDPM schedule: in bf16 the first steps add no noise."""
    betas = torch.linspace(1e-4, 0.02, 1000, dtype=torch.float64)
    return _measure(
        "noise schedule",
        "bf16",
        lambda alpha_bar: (1 - alpha_bar).sqrt()[:10],
        (1 - betas).cumprod(0),
        describe=lambda found, _: f"{int((found == 0).sum())} of the first 10 timesteps add no noise",
        why="close to 1 bf16 has a spacing of 0.0039 to 0.0078, so 1 - alpha_bar is rounded away",
    )


def measure_master_weights() -> Measured:
    """Apply 1,000 updates of 0.0001 each: in bf16 the weight never changes."""

    def train_weight(update: Tensor) -> Tensor:
        weight = torch.ones_like(update)
        for _ in range(1000):
            weight = weight + update
        return weight - 1

    return _measure(
        "master weights",
        "bf16",
        train_weight,
        torch.tensor(1e-4, dtype=torch.float64),
        describe=lambda found, exact: (
            f"after 1,000 updates of 0.0001 the weight moved by {float(found):g}, not {float(exact):.4f}"
        ),
        why="w + update == w if the update is below half the spacing of w",
    )


def _measure(
    name: str,
    half: str,
    compute: Callable[..., Tensor],
    *values: Tensor,
    describe: Callable[[Tensor, Tensor], str],
    why: str,
) -> Measured:
    """Compute in fp64, fp32 and the half format from the same fp64 values."""
    exact, single, found = (
        compute(*(value.to(dtype) for value in values)) for dtype in (torch.float64, torch.float32, HALF[half])
    )
    error_fp32, error_half = _compute_error(single, exact), _compute_error(found, exact)
    row = (name, half, describe(found, exact), f"{error_fp32:.1e}", f"{error_half:.1e}")
    return row, Claim(text=f"{name}: {why}", holds=error_half > 1e3 * max(error_fp32, 1e-12))


def _compute_error(found: Tensor, exact: Tensor) -> float:
    """Return the largest relative error; non-finite values count as 1."""
    relative = ((found.double() - exact) / exact).abs()
    return float(torch.where(found.isfinite(), relative, torch.ones_like(relative)).max())


def _make_generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)
