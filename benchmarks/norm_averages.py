"""Validation in the first epochs with several averages of BatchNorm's running statistics, on small data.

    python benchmarks/norm_averages.py [--seeds 3] [--cases unet-24 unet-demo]

The statistics do not enter a training step, so each run is trained once and validated with every form: torch's
momentum 0.1, the plain mean 1/n, the debiased average 0.1/(1 - 0.9^n), and k/(n + k - 1), which weights recent steps
more (Shamir and Zhang 2013); none goes below 0.1. Prints IoU or top-1 after each epoch, the mean over the seeds, and
the largest validation loss of any seed. About 5 minutes on one core.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

import halfstep as hs
from halfstep.step.norm_averages import NormAverages
from halfstep_train.run import assemble, loop
from halfstep_train.run.validate import validate
from halfstep_train.workloads.segmentation.demo import write_demo

MOMENTUM = 0.1
FORMS: dict[str, Callable[[int], float]] = {
    "torch (0.1)": lambda n: MOMENTUM,
    "1/n": lambda n: 1 / n,
    "debiased": lambda n: MOMENTUM / (1 - (1 - MOMENTUM) ** n),
    "3/(n+2)": lambda n: 3 / (n + 2),
    "5/(n+4)": lambda n: 5 / (n + 4),
    "8/(n+7)": lambda n: 8 / (n + 7),
}
UNET = ["data.image_size=64", "model.base_channels=8", "model.depth=3", "data.num_workers=0", "train.epochs=8"]
CASES = {
    "unet-24": ["unet", *UNET, "schedule.name=constant", "schedule.warmup_epochs=0", "optimizer.lr=1e-3"],
    "unet-24-fast": ["unet", *UNET, "schedule.name=onecycle", "optimizer.lr=5e-3"],
    "unet-24-batch-2": ["unet", *UNET, "schedule.name=constant", "optimizer.lr=1e-3", "train.batch_size=2"],
    "unet-demo": ["unet", "train.epochs=4"],
    "resnet18-demo": ["resnet18", "train.epochs=3"],
}
"""24 training images, with a small and a large learning rate and with tiny batches; the demo data of two workloads."""

Scores = dict[str, list[dict[str, float]]]


class EveryForm(NormAverages):
    """Average the statistics in all forms at once; the model keeps torch's."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model)
        self.num_steps = 0
        self.averages = {name: torch.cat(self._list_held()) for name in FORMS}

    def settle(self) -> None:
        self.num_steps += 1
        with torch.no_grad():
            batch = self._before + (torch.cat(self._list_held()) - self._before) / MOMENTUM
            for name, find_momentum in FORMS.items():
                self.averages[name].lerp_(batch, max(MOMENTUM, find_momentum(self.num_steps)))

    @torch.no_grad()
    def load(self, averages: torch.Tensor) -> None:
        for held, own in zip(self._list_held(), averages.split(self._sizes), strict=True):
            held.copy_(own)


def train(overrides: list[str], folder: Path) -> Scores:
    """Train one run; return each form's scores after each epoch."""
    scores: Scores = {name: [] for name in FORMS}
    made: list[EveryForm] = []

    def make_averages(model: torch.nn.Module) -> EveryForm:
        made.append(EveryForm(model))
        return made[0]

    def validate_all(*arguments: Any, **options: Any) -> dict[str, float]:
        for name in reversed(FORMS):  # torch's last, which the run goes on with
            made[0].load(made[0].averages[name])
            scores[name].append(validate(*arguments, **options))
        return scores[name][-1]

    assemble.NormAverages, loop.validate = make_averages, validate_all  # type: ignore[misc, assignment]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        hs.train(*overrides, "device=cpu", "train.fast=off", "log.quiet=true", out=folder)
    return scores


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_demo(folder / "images", num_images=30, side=64)
        for case in arguments.cases:
            data = [f"data.dir={folder / 'images'}", "data.val_fraction=0.2"] if case.startswith("unet-24") else []
            runs = [
                train([*CASES[case], *data, f"train.seed={seed}"], folder / f"{case}-{seed}")
                for seed in range(arguments.seeds)
            ]
            metric = "top1" if case.startswith("resnet") else "iou"
            print(f"{case}: {metric}, the mean of {arguments.seeds} seeds; largest loss", flush=True)
            for form in FORMS:
                epochs = list(zip(*(run[form] for run in runs), strict=True))
                means = "  ".join(f"{fmean(one[metric] for one in epoch):.2f}" for epoch in epochs)
                highest = "  ".join(f"{max(one['loss'] for one in epoch):6.2f}" for epoch in epochs)
                print(f"  {form:12} {means}   |  {highest}", flush=True)


if __name__ == "__main__":
    main()
