"""A tiny workload with what big ones have: a frozen encoder, noise by key, a scheduled weight, groups, averaged parts.

`model.options`: `encoder` names the frozen part's file (else it is random), `groups` and `ema_parts` switch these on.
`SEEN` notes what prepare and forward met.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import tiny_workload
from halfstep_train.data import noise
from halfstep_train.workloads.base.sums import Means
from halfstep_train.workloads.base.workload import Batch, FrozenPart, Group, Scheduled, Workload

SEEN: list[dict[str, Any]] = []
SIDE, WIDTH = 6, 5


class Samples(tiny_workload.Samples):
    def sample(self, index: int, *, key: tuple[int, int, int]) -> dict[str, Tensor]:
        return {"x": torch.linspace(0, 1 + index % 3, SIDE)}


class Encoder(nn.Module):
    """Used by a method that is not forward, as a VAE is."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(SIDE, WIDTH), nn.Linear(WIDTH, WIDTH)])
        self.norm = nn.LayerNorm(WIDTH)
        self.drop = nn.Dropout(0.5)
        self.register_buffer("scale", torch.tensor(0.5))

    def encode(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return self.drop(self.norm(x)) * self.scale


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(WIDTH, 8)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, SIDE)

    def forward(self, z: Tensor) -> Tensor:
        return self.head(self.norm(self.body(z)).relu())


class Error(Means):
    """Mean squared error."""

    def __init__(self) -> None:
        super().__init__(error=lambda outputs, batch: (outputs.detach().float() - batch["x"]).square())


def encoder_from(file: str) -> FrozenPart:
    encoder = Encoder()
    if file:
        encoder.load_state_dict(load_file(Path(file)))
    return FrozenPart(module=encoder, source=file)


def build(config: Any, store: Mapping[str, Any] | None = None) -> Workload:
    options = config.model.options
    encoder = encoder_from(options.get("encoder", ""))
    beta = Scheduled(lambda step: 1.0 - step / 100)

    def prepare(batch: Batch, *, key: tuple[int, ...], training: bool) -> Batch:
        x = batch["x"]
        SEEN.append(
            {
                "training": training,
                "grad": torch.is_grad_enabled(),
                "autocast": torch.is_autocast_enabled("cpu"),
                "product": (x @ x.T).dtype,
            }
        )
        return batch | {"eps": noise.normal(key, len(x), (WIDTH,), x.device)}

    def forward(model: nn.Module, batch: Batch) -> Tensor:
        with torch.no_grad():
            z = encoder.module.encode(batch["x"])
        outputs: Tensor = model(z + 0.1 * batch["eps"])
        return outputs

    def loss(outputs: Tensor, batch: Batch) -> Tensor:
        error = (outputs.float() - batch["x"]).square().mean()
        return error * beta.value

    groups = (Group(modules=("head",), lr=0.5, schedule={"name": "constant", "warmup_steps": 0}, weight_decay=0.25),)
    return Workload(
        name="frozen",
        model=Decoder(),
        train_samples=Samples(22),
        val_samples=Samples(9),
        prepare=prepare,
        forward=forward,
        loss=loss,
        metrics=Error,
        metric="error",
        mode="min",
        store=dict(store or {"side": SIDE}),
        frozen={"encoder": encoder},
        values={"beta": beta},
        groups=groups if options.get("groups") else (),
        ema_parts=tuple(options.get("ema_parts", ())),
    )
