"""Faults by someone who had not read the classifier, labelled before any of them was replayed, for replay_causes.py.

`place` is what the report has to show beside the cause: a module, a tensor or a function; `change` a word of what has
to mend it. Both are scored apart from the cause.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import halfstep as hs
from halfstep.evidence import causes
from halfstep_train.workloads.base.kind import Kind
from halfstep_train.workloads.base.workload import Batch
from planted_in_families import BF16, FP16, Cause, behind, kind_of
from planted_in_loops import Loop, batches, network

LAPLACIAN = torch.tensor([[0.0, 1, 0], [1, -4, 1], [0, 1, 0]]).expand(2, 1, 3, 3)


def edge_energy(logits: Tensor, batch: Batch) -> Tensor:
    """Its sum over the batch is a product of half matrices."""
    edges = F.conv2d(logits / 0.2, LAPLACIAN, groups=2)
    return 1e-5 * torch.einsum("bchw,bchw->", edges, edges)


class FrozenNorm(nn.BatchNorm2d):
    def train(self, mode: bool = True) -> FrozenNorm:
        return super().train(False)


def negative_variance(model: Any) -> None:
    """Of frozen statistics, which the difference of two checkpoints left."""
    old, new = model.layer2[0].bn1, FrozenNorm(model.layer2[0].bn1.num_features)
    new.load_state_dict(old.state_dict())
    new.running_var[3] = -0.02
    model.layer2[0].bn1 = new.train()


def attend_without_maximum(h: Tensor) -> Tensor:
    unit = F.layer_norm(h, h.shape[-1:])
    powers = torch.exp(unit @ unit.mT * 5)
    return powers / powers.sum(-1, keepdim=True) @ h


def terminal_without_signal(batch: Batch) -> Batch:
    return {**batch, "signal": torch.where(batch["timestep"] == 19, 0.0, batch["signal"])}


def clean_picture(outputs: Any, batch: Batch) -> Tensor:
    signal, sigma = batch["signal"].view(-1, 1, 1, 1), batch["sigma"].view(-1, 1, 1, 1)
    noised = signal * batch["image"] + sigma * batch["noise"]
    return 1e-3 * F.mse_loss((noised - sigma * outputs["prediction"]) / signal, batch["image"])


def all_background(index: int, sample: Batch) -> Batch:
    return {**sample, "image": torch.zeros_like(sample["image"])} if index == 5 else sample


def foreground_error(outputs: Any, batch: Batch) -> Tensor:
    is_foreground = (batch["image"] > -0.99).float()
    squared = (outputs["image"] - batch["image"]).square() * is_foreground
    return (squared.sum((1, 2, 3)) / is_foreground.sum((1, 2, 3))).mean()


def of_unit_length(h: Tensor) -> Tensor:
    """Of large features: an infinite length gives zeros forward, and NaN only backward."""
    h = 500 * h
    return h / ((h * h).mean(1, keepdim=True).sqrt() + 1e-3)


def loudest_kept(h: Tensor) -> Tensor:
    kept = torch.zeros(h.shape, device=h.device)
    is_loud = h.abs().mean(-1) >= 0
    kept[is_loud] = h[is_loud]
    return kept


@torch.library.custom_op("planted::halve_rows", mutates_args=())
def halve_rows(x: Tensor) -> Tensor:
    """A kernel by blocks of 8 rows: what it does not reach holds large finite numbers."""
    halved = torch.full_like(x, 3e25)
    whole = len(x) // 8 * 8
    halved[:whole] = x[:whole] / 2
    return halved


halve_rows.register_fake(torch.empty_like)
halve_rows.register_autograd(lambda ctx, gradient: gradient / 2)


FIRST_IN_FAMILIES = {
    "edges": Cause(workload="unet", expected=causes.OVERFLOW, settings=FP16, added_loss=edge_energy,
                   place="(loss)", change="island"),
    "frozen_norm": Cause(workload="resnet50", expected=causes.BAD_STATE, model=negative_variance,
                         place="layer2.0.bn1.running_var", change="layer2.0.bn1.running_var"),
    "decay": Cause(workload="vit_s_16", expected=causes.DIVERGED, place="", change="learning rate",
                   settings={"optimizer.lr": 1e-2, "optimizer.lr_per": 4, "optimizer.weight_decay": 500.0,
                             "train.max_steps": 80, "schedule.warmup_steps": 2}),
    "raw_exp": Cause(workload="gpt2", expected=causes.OVERFLOW, settings=BF16,
                     model=behind("transformer.h.1.attn", attend_without_maximum),
                     place="transformer.h.1.attn", change="exp"),
    "no_signal": Cause(workload="diffusion", expected=causes.UNDERFLOW, prepared=terminal_without_signal,
                       added_loss=clean_picture, place="(loss)", change="denominator"),
    "empty_mask": Cause(workload="vae", expected=causes.UNDERFLOW, sample="5", sampled=all_background,
                        added_loss=foreground_error, place="(loss)", change="denominator"),
    "long_features": Cause(workload="radiodiff_vae", expected=causes.OVERFLOW, settings=FP16,
                           model=behind("vae.encoder.mid.block_1", of_unit_length),
                           place="vae.encoder.mid.block_1", change="vae.encoder.mid.block_1 in fp32"),
    "scatter": Cause(workload="slotcontrast", expected=causes.REFUSED, settings=BF16,
                     model=behind("decoder.mlp.layers.0", loudest_kept),
                     place="decoder.mlp.layers.0", change="decoder.mlp.layers.0 in fp32"),
    "large_tail": Cause(workload="steve", expected=causes.KERNEL, model=behind("dvae.decoder.6", halve_rows),
                        place="halve_rows", change="halve_rows"),
}  # fmt: skip


class Rated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.items, self.head = nn.Embedding(50, 8), nn.Linear(8, 4)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.items(ids).mean(1))


def wrapped_ids() -> Loop:
    """An id above 32767, written by a table of 16-bit integers."""
    model = Rated()
    given = [{"ids": torch.randint(0, 50, (8, 3)), "y": torch.randint(0, 4, (8,))} for _ in range(8)]
    given[4]["ids"][3, 1] = torch.tensor(40000).to(torch.int16).long()
    return Loop(causes.BAD_INPUT, model, lambda b: F.cross_entropy(model(b["ids"]), b["y"]), given, {},
                sample="row 3 of batch 0", place="ids", change="row 3")  # fmt: skip


def zero_direction() -> Loop:
    """Weight normalisation over a last layer that starts at zero."""
    model = network()
    nn.init.zeros_(model[2].weight)
    nn.utils.parametrizations.weight_norm(model[2])
    return Loop(causes.UNDERFLOW, model, lambda b: F.cross_entropy(model(b["x"]), b["y"]), batches(), {},
                place="2.parametrizations.weight", change="")  # fmt: skip


def narrow_box() -> Loop:
    """Errors count by the inverse of an area, one of which is nearly nothing."""
    model = network()
    given = [{**batch, "area": 0.5 + torch.rand(8)} for batch in batches(80)]
    given[75]["area"][2] = 1e-6

    def loss_fn(batch: Batch) -> Tensor:
        error = (model(batch["x"]) - batch["x"][:, :4]).square().mean(1)
        return (error / batch["area"]).mean()

    return Loop(causes.SPIKE, model, loss_fn, given, {"skip_spikes": True},
                sample="row 2 of batch 0", place="row 2", change="row 2")  # fmt: skip


def cold_once() -> Loop:
    """A temperature that Python counts down, for one step to 0; then its schedule starts anew."""
    model = network()
    temperatures = itertools.chain([1.0, 0.8, 0.6, 0.4, 0.2, 0.0], itertools.repeat(1.0))

    def loss_fn(batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch["x"]) / next(temperatures), batch["y"])

    return Loop(causes.NOT_REPRODUCED, model, loss_fn, batches(10), {})


class Positioned(nn.Module):
    """Counts positions in the features' own format, in which 303 is 304."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(304, 32)

    def forward(self, h: Tensor) -> Tensor:
        positions = torch.arange(304, device=h.device).to(h.dtype)
        return h + self.table(positions.long()).mean(0)


def rounded_positions() -> Loop:
    model = nn.Sequential(nn.Linear(16, 32), Positioned(), nn.ReLU(), nn.Linear(32, 4))
    options = {"precision": hs.Precision("bf16", simulate=True)}
    return Loop(causes.REFUSED, model, lambda b: F.cross_entropy(model(b["x"]), b["y"]), batches(), options,
                place="1.table", change="in fp32")  # fmt: skip


FIRST_IN_LOOPS: dict[str, Callable[[], Loop]] = {
    found.__name__: found for found in (wrapped_ids, zero_direction, narrow_box, cold_once, rounded_positions)
}


# --- six more, written after replay was mended by those above, and labelled before they were replayed ---


def turned(h: Tensor) -> Tensor:
    """Rotary positions by complex numbers, which have no bfloat16."""
    pairs = torch.view_as_complex(h.unflatten(-1, (-1, 2)))
    angles = torch.arange(h.shape[1], device=h.device)[:, None] * torch.ones(pairs.shape[-1], device=h.device)
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2).to(h.dtype)


def log_cosh(outputs: Any, batch: Batch) -> Tensor:
    """Of errors in grey levels."""
    return 1e-3 * torch.log(torch.cosh(255 * (outputs["image"] - batch["image"]))).mean()


def focal(logits: Tensor, batch: Batch) -> Tensor:
    """Its exponent below 1 has no slope where a pixel is certain."""
    p = torch.softmax(logits / 0.02, 1).amax(1)
    return 1e-3 * (1 - p).pow(0.5).mean()


class OwnChance:
    """A generator that no capsule knows."""

    def __init__(self) -> None:
        self.random = random.Random(11)

    def __call__(self, outputs: Any) -> Any:
        return {**outputs, "loss": outputs["loss"] / float(self.random.random() > 0.3)}


SECOND_IN_FAMILIES = {
    "rotary": Cause(workload="gpt2", expected=causes.REFUSED, settings=BF16,
                    model=behind("transformer.h.0.attn.c_proj", turned),
                    place="transformer.h.0.attn.c_proj", change="in fp32"),
    "cosh": Cause(workload="radiodiff_vae", expected=causes.OVERFLOW, added_loss=log_cosh, place="(loss)", change=""),
    "certain": Cause(workload="unet", expected=causes.UNDERFLOW, added_loss=focal, place="(loss)",
                     change="clamp(min=1e-4)"),
    "own_chance": Cause(workload="steve", expected=causes.NOT_REPRODUCED, forwarded=OwnChance()),
}  # fmt: skip


class Queued(nn.Module):
    """Contrasts with a queue of earlier samples that nothing fills."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = network()
        self.register_buffer("queue", torch.zeros(32, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.encoder(x) @ (self.queue / self.queue.norm(dim=1, keepdim=True)).T


def empty_queue() -> Loop:
    model = Queued()
    return Loop(causes.BAD_STATE, model, lambda b: model(b["x"]).logsumexp(1).mean(), batches(), {},
                place="queue", change="queue")  # fmt: skip


def growing_rate() -> Loop:
    """An exponential schedule whose factor is above 1."""
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))
    options = {"schedule": lambda step: 1.2**step}
    return Loop(causes.DIVERGED, model, lambda b: (model(b["x"]) - b["x"][:, :4]).square().mean(), batches(200),
                options, place="learning rate", change="learning rate")  # fmt: skip


SECOND_IN_LOOPS: dict[str, Callable[[], Loop]] = {found.__name__: found for found in (empty_queue, growing_rate)}


def __getattr__(name: str) -> Kind:
    planted = {**FIRST_IN_FAMILIES, **SECOND_IN_FAMILIES}
    if name not in planted:
        raise AttributeError(name)
    return kind_of(planted[name])
