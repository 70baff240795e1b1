"""Exercise 2: make fp16 overflow. The loss scale falls, steps are skipped, training recovers; then without scaling."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from halfstep.formats import FORMATS
from halfstep.hardware.probe import probe
from halfstep.precision.apply import apply
from halfstep.precision.decide import decide
from halfstep.step.scaler import ScalerOptions
from halfstep.step.step import GuardedStep
from halfstep_train.config.schema import PrecisionConfig
from halfstep_train.exercises import Claim, Story
from halfstep_train.report.picture_file import BAD, FAINT, INK, make_figure, save_figure

STEPS = 40
LOSS_FACTOR = 2.0e-6
"""Makes the loss so small that fp16 flushes its gradients to zero, as a mean over many pixels does."""
FIRST_SCALE = 2.0**40
"""Far too large on purpose: gradients overflow until the scale has fallen."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScaledTraining:
    """The record of one training."""

    losses: list[float]
    scales: list[float]
    skipped: list[int]
    gradients: Tensor
    """Scaled gradients of the last step in fp16."""

    @property
    def learned(self) -> float:
        """Return the relative decrease of the loss."""
        return 1 - self.losses[-1] / self.losses[0]


def run(folder: Path, *, steps: int = STEPS) -> Story:
    """Train with and without loss scaling, and check what happened."""
    # A scale of 1 means no scaling: the same code with and without it.
    scaled, unscaled = train(scale=FIRST_SCALE, steps=steps), train(scale=1.0, steps=steps)
    picture = folder / "exercise2.png"
    _draw(scaled, unscaled, picture)
    flushed = float((unscaled.gradients == 0).float().mean())
    comes_first = bool(scaled.skipped) and scaled.skipped == list(range(len(scaled.skipped)))
    smallest = FORMATS["fp16"].smallest_subnormal
    return Story(
        title="Exercise 2: overflow in fp16, and what loss scaling does about it",
        titles=("training", "first scale", "last scale", "skipped steps", "loss fell by", "gradients that are 0"),
        rows=[_format_cells("with dynamic loss scaling", scaled), _format_cells("without scaling", unscaled)],
        claims=[
            Claim(text="the scale fell until gradients were finite", holds=scaled.scales[-1] < FIRST_SCALE),
            Claim(text="skipped steps came first, and then none", holds=comes_first),
            Claim(text="with scaling the loss fell by more than half", holds=scaled.learned > 0.5),
            Claim(text="without scaling gradients were flushed to zero", holds=flushed > 0.5),
            Claim(text="without scaling nothing was learned", holds=unscaled.learned < 0.1),
        ],
        comments=[
            f"the scale starts at 2^{math.log2(FIRST_SCALE):.0f}: gradients exceed {FORMATS['fp16'].largest:g}, the "
            "largest number of fp16, so the step is skipped and the scale is halved, until the gradients fit",
            "a skipped step changes nothing: weights, optimizer state and schedule keep their bits",
            f"without scaling, gradients of such a small loss are below {smallest:.2g}, the smallest number of fp16",
            "bf16 has the exponent of fp32 and needs none of this",
        ],
        picture=picture,
    )


def train(*, scale: float, steps: int) -> ScaledTraining:
    """Train a small regression in fp16, simulated if the hardware lacks it."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(256, 16, generator=generator)
    y = (x @ torch.randn(16, 1, generator=generator)).tanh()
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1)).to(device)
    # The rate undoes LOSS_FACTOR, so that the small loss alone does not slow learning.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2 / LOSS_FACTOR, fused=device.type == "cuda")
    options = ScalerOptions(init_scale=scale, growth_interval=10**6)
    precision = PrecisionConfig(default="fp16", simulate=device.type != "cuda")
    plan = decide(precision, probe(str(device)), model)
    step = GuardedStep(apply(plan, model), optimizer, plan, scaler=options)
    batch = {"x": x.to(device), "y": y.to(device)}

    def loss_fn(window: dict[str, Tensor]) -> Tensor:
        return F.mse_loss(model(window["x"]).float(), window["y"]) * LOSS_FACTOR

    made = [step(loss_fn, [batch]).read() for _ in range(steps)]
    return ScaledTraining(
        losses=[one.loss / LOSS_FACTOR for one in made],
        scales=[one.scale for one in made],
        skipped=[number for number, one in enumerate(made) if one.is_bad],
        gradients=_compute_gradients(model, batch, made[-1].scale),
    )


def _compute_gradients(model: nn.Module, batch: dict[str, Tensor], scale: float) -> Tensor:
    """Compute all gradients of a step, rounded to fp16."""
    model.zero_grad()
    loss = F.mse_loss(model(batch["x"]), batch["y"]) * LOSS_FACTOR * scale
    loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).half().float().cpu()


def _format_cells(name: str, trace: ScaledTraining) -> tuple[str, ...]:
    zeros = float((trace.gradients == 0).float().mean())
    return (
        name,
        f"2^{math.log2(trace.scales[0]):.0f}",
        f"2^{math.log2(trace.scales[-1]):.0f}",
        str(len(trace.skipped)),
        f"{trace.learned:.0%}",
        f"{zeros:.0%}",
    )


def _draw(scaled: ScaledTraining, unscaled: ScaledTraining, path: Path) -> None:
    """Draw the loss scale by step, and the gradients' sizes next to fp16's limits."""
    figure = make_figure((10, 3.6))
    left, right = figure.subplots(1, 2)
    left.plot(scaled.scales, color=INK, linewidth=1.8)
    left.scatter(scaled.skipped, [scaled.scales[s] for s in scaled.skipped], color=BAD, s=14, label="skipped", zorder=3)
    left.set_yscale("log", base=2)
    left.set_title("loss scale by step", loc="left", fontsize=10, color=FAINT)
    left.set_xlabel("step", color=FAINT)
    left.legend(frameon=False)
    bins = torch.linspace(-12, 5, 60)
    for trace, name, colour in ((scaled, "scaled", "#2f6fde"), (unscaled, "not scaled", "#e8710a")):
        sizes = trace.gradients.abs()
        right.hist(sizes[sizes > 0].log10().numpy(), bins=bins.numpy().tolist(), alpha=0.6, color=colour,
                   label=f"{name}: {float((sizes == 0).float().mean()):.0%} are zero")  # fmt: skip
    for edge, name in ((FORMATS["fp16"].smallest_subnormal, "smallest"), (FORMATS["fp16"].largest, "largest")):
        right.axvline(math.log10(edge), color=BAD, linewidth=1, linestyle="--")
        right.annotate(f"{name} ", (math.log10(edge), 0.8), xycoords=("data", "axes fraction"), fontsize=8, color=BAD,
                       ha="right")  # fmt: skip
    right.set_title("gradients as fp16 holds them, log10 of their size", loc="left", fontsize=10, color=FAINT)
    right.legend(frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.56, 1))
    save_figure(figure, path)
