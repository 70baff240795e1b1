"""Exercise 3: what stays in fp32 and why. Repeat each computation in half precision and measure what breaks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from halfstep_train.exercises import Claim, Story
from halfstep_train.report.picture_file import BAD, FAINT, GOOD, make_figure, save_figure


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptPart:
    """A computation that stays in fp32: its error in fp32 and in a half format, relative to fp64."""

    name: str
    format: str
    error_fp32: float
    error_half: float
    seen: str
    """What happens in half precision, with numbers."""
    why: str


def run(folder: Path) -> Story:
    """Measure each computation in fp32 and in a half format."""
    parts = [
        measure_softmax(),
        measure_layer_norm(),
        measure_dice(),
        measure_noise_schedule(),
        measure_master_weights(),
    ]
    picture = folder / "exercise3.png"
    _draw(parts, picture)
    return Story(
        title="Exercise 3: what stays in fp32, and why",
        titles=("part", "in half", "what breaks", "error fp32", "error half"),
        rows=[(p.name, p.format, p.seen, f"{p.error_fp32:.1e}", f"{p.error_half:.1e}") for p in parts],
        claims=[Claim(text=f"{p.name}: {p.why}", holds=p.error_half > 1e3 * max(p.error_fp32, 1e-12)) for p in parts],
        comments=[
            "errors are relative to fp64; halfstep keeps these in fp32 in every precision: regions of the model as "
            "islands, and the weights that the optimizer updates"
        ],
        picture=picture,
        numbers={p.name: {"fp32": p.error_fp32, "half": p.error_half} for p in parts},
    )


def measure_softmax() -> KeptPart:
    """Sum 4096 small terms: in bf16 the sum stops growing when a term is below half its spacing."""
    logits = torch.randn(8, 4096, generator=_make_generator(), dtype=torch.float64)

    def compute_sums(x: Tensor) -> Tensor:
        powers = (x - x.max(1, keepdim=True).values).exp()
        return _sum_one_by_one(powers)

    wrong = _compute_error(compute_sums(logits.bfloat16()), compute_sums(logits))
    return KeptPart(
        name="softmax sums",
        format="bf16",
        error_fp32=_compute_error(compute_sums(logits.float()), compute_sums(logits)),
        error_half=wrong,
        seen=f"the sum over 4,096 terms is {wrong:.0%} too small",
        why="a running sum in bf16 stops growing once a term is below half its spacing",
    )


def measure_layer_norm() -> KeptPart:
    """Compute a variance: squares of activations above 256 exceed fp16's largest number."""
    x = torch.randn(4, 1024, generator=_make_generator(), dtype=torch.float64) * 400

    def compute_variance(values: Tensor) -> Tensor:
        centred = values - values.mean(1, keepdim=True)
        return (centred * centred).sum(1) / values.shape[1]

    found = compute_variance(x.half())
    return KeptPart(
        name="variance of a norm",
        format="fp16",
        error_fp32=_compute_error(compute_variance(x.float()), compute_variance(x)),
        error_half=_compute_error(found, compute_variance(x)),
        seen=f"{int(found.isinf().sum())} of {len(found)} variances are infinite",
        why="squares of activations above 256 exceed 65504, so the normalised output is 0",
    )


def measure_dice() -> KeptPart:
    """Compute Dice, which sums over all pixels of a batch."""
    probabilities = torch.rand(4, 256, 256, generator=_make_generator(), dtype=torch.float64)
    mask = (torch.rand(4, 256, 256, generator=_make_generator(), dtype=torch.float64) > 0.5).double()

    def compute_dice(p: Tensor, m: Tensor) -> Tensor:
        inter, sets = (p * m).sum(dtype=p.dtype), p.sum(dtype=p.dtype) + m.sum(dtype=m.dtype)
        return 2 * inter / sets

    exact, found = compute_dice(probabilities, mask), compute_dice(probabilities.half(), mask.half())
    return KeptPart(
        name="Dice sums",
        format="fp16",
        error_fp32=_compute_error(compute_dice(probabilities.float(), mask.float()), exact),
        error_half=_compute_error(found, exact),
        seen=f"Dice is {float(found):g} instead of {float(exact):.4f}",
        why="a sum over 262,144 pixels exceeds 65504, and infinity divided by infinity is NaN",
    )


def measure_noise_schedule() -> KeptPart:
    """Compute the linear DDPM schedule: in bf16 the first steps add no noise."""
    betas = torch.linspace(1e-4, 0.02, 1000, dtype=torch.float64)
    kept = (1 - betas).cumprod(0)

    def compute_sigma(alpha_bar: Tensor) -> Tensor:
        return (1 - alpha_bar).sqrt()[:10]

    found = compute_sigma(kept.bfloat16())
    return KeptPart(
        name="noise schedule",
        format="bf16",
        error_fp32=_compute_error(compute_sigma(kept.float()), compute_sigma(kept)),
        error_half=_compute_error(found, compute_sigma(kept)),
        seen=f"{int((found == 0).sum())} of the first 10 timesteps add no noise",
        why="close to 1 bf16 has a spacing of 0.0039 to 0.0078, so 1 - alpha_bar is rounded away",
    )


def measure_master_weights() -> KeptPart:
    """Apply 1,000 updates of 0.0001 each: in bf16 the weight never changes."""

    def train_weight(dtype: torch.dtype) -> Tensor:
        weight = torch.ones((), dtype=dtype)
        for _ in range(1000):
            weight = weight + torch.tensor(1e-4, dtype=dtype)
        return weight - 1

    exact, found = train_weight(torch.float64), train_weight(torch.bfloat16)
    return KeptPart(
        name="master weights",
        format="bf16",
        error_fp32=_compute_error(train_weight(torch.float32), exact),
        error_half=_compute_error(found, exact),
        seen=f"after 1,000 updates of 0.0001 the weight moved by {float(found):g}, not {float(exact):.4f}",
        why="w + update == w if the update is below half the spacing of w",
    )


def _sum_one_by_one(terms: Tensor) -> Tensor:
    """Sum in the format of the terms, as a kernel without a wider accumulator does."""
    total = torch.zeros(len(terms), dtype=terms.dtype)
    for column in terms.unbind(1):
        total = total + column
    return total


def _compute_error(found: Tensor, exact: Tensor) -> float:
    """Return the largest relative error; non-finite values count as 1."""
    relative = ((found.double() - exact) / exact).abs()
    return float(torch.where(found.isfinite(), relative, torch.ones_like(relative)).max())


def _make_generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def _draw(parts: list[KeptPart], path: Path) -> None:
    """Draw the errors in fp32 and in the half format."""
    figure = make_figure((8.4, 3.6))
    axes = figure.subplots()
    places: Callable[[float], list[float]] = lambda shift: [index + shift for index in range(len(parts))]  # noqa: E731
    axes.barh(places(0.2), [max(p.error_half, 1e-10) for p in parts], height=0.36, color=BAD, label="half")
    axes.barh(places(-0.2), [max(p.error_fp32, 1e-10) for p in parts], height=0.36, color=GOOD, label="fp32")
    axes.set_xscale("log")
    axes.set_yticks(range(len(parts)), [f"{p.name} ({p.format})" for p in parts])
    axes.invert_yaxis()
    axes.set_title("largest relative error against fp64", loc="left", fontsize=10, color=FAINT)
    axes.legend(frameon=False, loc="lower right", bbox_to_anchor=(1, 1), ncols=2)  # above: bars fill the axes
    save_figure(figure, path)
