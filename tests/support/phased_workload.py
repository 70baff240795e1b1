"""A workload of two networks in turn, by import path: tiny, with BatchNorm in both and steps poisoned by phase.

`model.options`: `poisoned: {phase: [iterations]}`, `critic: {every, from_step, compiles, ...}` and what else a Phase
takes, `generator` likewise, `penalty` for a critic loss that takes gradients itself, and a signal in mid-run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halfstep_train.data.noise import normal
from halfstep_train.workloads.base.sums import Means
from halfstep_train.workloads.base.workload import Batch, Phase, Workload
from tiny_workload import Samples, signal_once

SIZE = 2 * 8 * 8


class Pair(nn.Module):
    """A generator that denoises and a critic; each holds BatchNorm, which the other's phase writes as well."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(SIZE, 8), nn.BatchNorm1d(8), nn.SiLU(), nn.Linear(8, SIZE))
        self.critic = nn.Sequential(
            nn.Linear(SIZE, 8), nn.BatchNorm1d(8), nn.SiLU(), nn.Dropout(dropout), nn.Linear(8, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.generator(x)


class Error(Means):
    """The mean squared error."""

    def __init__(self) -> None:
        super().__init__(error=lambda outputs, batch: (outputs["image"].double() - batch["clean"]).square())


def denoised(model: Pair, batch: Batch) -> Batch:
    return {"image": model(batch["noisy"])}


def denoised_and_judged(model: Pair, batch: Batch) -> Batch:
    image = model(batch["noisy"])
    return {"image": image, "score": model.critic(image)}


def reconstruction(outputs: Batch, batch: Batch) -> tuple[Tensor, int]:
    return F.mse_loss(outputs["image"].float(), batch["clean"]), len(batch["clean"])


def generators_loss(outputs: Batch, batch: Batch) -> tuple[Tensor, int]:
    value, weight = reconstruction(outputs, batch)
    return value + 0.1 * F.softplus(-outputs["score"]).mean() + batch["bad_generator"].mean(), weight


def build(config: Any, store: Mapping[str, Any] | None = None) -> Workload:
    options = config.model.options
    poisoned = {name: set(steps) for name, steps in options.get("poisoned", {}).items()}
    loud = set(options.get("loud", ()))
    penalty = options.get("penalty", False)

    def prepare(batch: Batch, *, key: tuple[int, ...], training: bool) -> Batch:
        clean = batch["image"].flatten(1)
        noisy = clean + normal(key, len(clean), (SIZE,), clean.device, stream="eps")
        step = key[1] if training else -1
        if step == options.get("signal_step", -1):
            signal_once(options)
        bad = {
            f"bad_{name}": torch.full((len(clean),), float("nan") if step in poisoned.get(name, ()) else 0.0).to(clean)
            for name in ("generator", "critic")
        }
        loudness = torch.full((len(clean),), 1e30 if step in loud else 1.0).to(clean)
        return {"clean": clean, "noisy": noisy, "loudness": loudness, "index": batch["index"], **bad}

    def both_judged(net: Pair, batch: Batch) -> Batch:
        real = batch["clean"].detach().requires_grad_() if penalty else batch["clean"]
        return {"real": real, "of_real": net.critic(real), "of_fake": net.critic(net.generator(batch["noisy"]))}

    def critics_loss(outputs: Batch, batch: Batch) -> tuple[Tensor, int]:
        value = F.softplus(-outputs["of_real"]).mean() + F.softplus(outputs["of_fake"]).mean()
        if penalty:
            (slope,) = torch.autograd.grad(outputs["of_real"].sum(), outputs["real"], create_graph=True)
            value = value + 0.1 * slope.square().sum(1).mean()
        return (value.float() + batch["bad_critic"].mean()) * batch["loudness"].mean(), len(batch["clean"])

    given: dict[str, dict[str, Any]] = {
        "generator": {"forward": denoised_and_judged, "loss": generators_loss, "counted": True},
        "critic": {"forward": both_judged, "loss": critics_loss},
    }
    phases = [
        Phase(**{"name": name, "parameters": (name,), **own, **options.get(name, {})})
        for name, own in given.items()
        if name not in options.get("without", ())
    ]
    return Workload(
        name="pair",
        model=Pair(options.get("dropout", 0.1)),
        train_samples=Samples(22),
        val_samples=Samples(9),
        prepare=prepare,
        forward=denoised,
        loss=reconstruction,
        metrics=Error,
        metric="error",
        mode="min",
        phases=tuple(phases),
        store=dict(store or {}),
    )
