"""Draw the README's picture: one batch gives NaN; a plain loop and hs.Step go on from there, and replay names the line.

    python benchmarks/readme_picture.py [--out docs/nan_step.png]

Both loops train the same small network from the same weights on the same batches, fp32 on the CPU. The loss normalises
each row by its length, so a row of zeros gives 0/0.
"""

from __future__ import annotations

import argparse
import copy
import math
import tempfile
import textwrap
import warnings
from collections.abc import Callable
from pathlib import Path

import matplotlib as mpl
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import halfstep as hs

mpl.use("Agg")
from matplotlib import pyplot as plt

NUM_STEPS, BAD_STEP = 120, 60
OURS, PLAIN = "#1f77b4", "#d95f02"
Loss = Callable[[tuple[Tensor, Tensor]], Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent.parent / "docs" / "nan_step.png")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 5))
    batches = make_batches(copy.deepcopy(model))
    plain = train_plainly(copy.deepcopy(model), batches)
    with tempfile.TemporaryDirectory() as folder:
        guarded, answer = train_guarded(model, batches, Path(folder))
    draw(plain, guarded, answer, arguments.out)
    print(answer)
    print(f"wrote {arguments.out}")


def make_batches(teacher: nn.Module) -> list[tuple[Tensor, Tensor]]:
    batches = []
    for step in range(NUM_STEPS):
        x = torch.randn(32, 20)
        target = teacher(x).argmax(dim=1)
        if step == BAD_STEP:
            x[7] = 0.0  # an empty row, as real data have
        batches.append((x, target))
    return batches


def make_loss(model: nn.Module) -> Loss:
    def loss_fn(batch: tuple[Tensor, Tensor]) -> Tensor:
        x, target = batch
        x = x / x.norm(dim=1, keepdim=True)  # 0/0 for a row of zeros
        return F.cross_entropy(model(x * 4), target)

    return loss_fn


def train_plainly(model: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> list[float]:
    optimizer, loss_fn = torch.optim.AdamW(model.parameters(), lr=3e-3), make_loss(model)
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = loss_fn(batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def train_guarded(model: nn.Module, batches: list[tuple[Tensor, Tensor]], folder: Path) -> tuple[list[float], str]:
    optimizer, loss_fn = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True), make_loss(model)
    step = hs.Step(model, optimizer, "fp32", clip_norm=1.0, capsules=folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the dropped step, which the picture shows
        losses = [step(loss_fn, [batch]).loss for batch in batches]
        [capsule] = sorted(folder.iterdir())
        return losses, str(hs.replay(capsule, model, loss_fn))


def draw(plain: list[float], guarded: list[float], answer: str, path: Path) -> None:
    figure, (curves, text) = plt.subplots(1, 2, figsize=(11, 4.2), width_ratios=(1.15, 1), dpi=130)
    lost = next(step for step, loss in enumerate(plain) if not math.isfinite(loss))
    curves.axvline(lost, color="#999999", linewidth=1, linestyle=":")
    curves.plot(range(len(guarded)), guarded, color=OURS, label="hs.Step: the bad step is dropped")
    curves.plot(
        range(lost), plain[:lost], color=PLAIN, linewidth=2.2, linestyle="--", label="plain loop: NaN from here on"
    )
    curves.plot(lost, plain[lost - 1], marker="X", markersize=11, color=PLAIN, linestyle="none")
    curves.set(xlabel="step", ylabel="training loss", ylim=(0, None), xlim=(0, len(guarded)))
    curves.legend(frameon=False, loc="upper right")
    curves.spines[["top", "right"]].set_visible(False)
    text.axis("off")
    text.set_title("hs.replay(capsule, model, loss_fn)", loc="left", fontfamily="monospace", fontsize=10)
    lines = answer.replace(f"{Path(__file__).parent}/", "").splitlines()
    shown = "\n".join(textwrap.fill(line, 66, subsequent_indent="    ") for line in lines)
    text.text(0, 0.97, shown, va="top", fontfamily="monospace", fontsize=7.6, linespacing=1.4)
    figure.tight_layout()
    figure.savefig(path, facecolor="white")


if __name__ == "__main__":
    main()
