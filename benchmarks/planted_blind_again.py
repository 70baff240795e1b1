"""Twelve more faults by someone who had not read the classifier, labelled before their replay, for replay_causes.py.

Labels as in planted_blind.py.
"""

from __future__ import annotations

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


def precision_of_the_sure(logits: Tensor, batch: Batch) -> Tensor:
    """No pixel is sure at first. Meant as 0/0 in half; autocast sums in fp32, and 1/1e-8 overflows half backward."""
    p = torch.softmax(logits, 1)[:, 1].half()
    sure = p * (p > 0.999)
    hits = (sure * (batch["mask"] == 1)).sum((1, 2))
    return -0.1 * (hits / (sure.sum((1, 2)) + 1e-8)).float().mean()


def infinite_weight(model: Any) -> None:
    """A checkpoint written in half, of a weight above 65504."""
    with torch.no_grad():
        model.layer3[0].conv2.weight[2, 1, 0, 0] = torch.tensor(7e4).half().float()


def cubic_gelu(h: Tensor) -> Tensor:
    """GELU by hand, of large features: its tanh holds the infinite cube forward, and not backward."""
    x = 2000 * h
    return 0.5 * x * (1 + torch.tanh(0.79788456 * (x + 0.044715 * x * x * x))) / 2000


def similar_at_scales(outputs: Any, batch: Batch) -> Tensor:
    """MS-SSIM's product of powers, of structures that are negative before anything is learnt."""
    structures = []
    for scale in (1, 2, 4):
        one, other = (F.avg_pool2d(picture, scale).flatten(1) for picture in (outputs["image"], batch["image"]))
        one, other = one - one.mean(1, keepdim=True), other - other.mean(1, keepdim=True)
        covariance = (one * other).mean(1)
        structures.append((covariance + 1e-3) / (one.square().mean(1).sqrt() * other.square().mean(1).sqrt() + 1e-3))
    weights = torch.tensor([0.2, 0.3, 0.5])
    return 0.1 * (1 - torch.stack(structures, 1).pow(weights).prod(1)).mean()


def towards_their_mean(h: Tensor) -> Tensor:
    """Which is taken in fp32, and lerp wants one dtype."""
    return torch.lerp(h, h.float().mean((2, 3), keepdim=True).expand(h.shape), 0.1).to(h.dtype)


def burnt_pixel(batch: Batch) -> Batch:
    """Of clip 3, a corrupt float."""
    video = batch["video"].clone()
    video[batch["index"] == 3, 1, 0, 7, 9] = float("inf")
    return {**batch, "video": video}


class Softplus(torch.autograd.Function):
    """Keeps its exponential in half, to save memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        power = torch.exp(20 * x)
        ctx.save_for_backward(power.half())
        return torch.log1p(power) / 20

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        power = ctx.saved_tensors[0].float()
        return gradient * power / (1 + power)


def soft(h: Tensor) -> Tensor:
    return Softplus.apply(h.clamp(-4, 4))


def forgotten(h: Tensor) -> Tensor:
    """Gates multiplied up as a sum of logarithms; a shut gate is 0 in half."""
    gate = torch.sigmoid(150 * h)
    return h * torch.exp(torch.cumsum(torch.log(gate), 1)).to(h.dtype)


# The label of "sure" is as it was first given, and wrong: its forward is finite, and "overflow" is right.
THIRD_IN_FAMILIES = {
    "sure": Cause(workload="unet", expected=causes.UNDERFLOW, settings=FP16, added_loss=precision_of_the_sure,
                  place="(loss)", change="denominator"),
    "half_checkpoint": Cause(workload="resnet50", expected=causes.BAD_STATE, model=infinite_weight,
                             place="layer3.0.conv2.weight", change="layer3.0.conv2.weight"),
    "cubic": Cause(workload="vit_s_16", expected=causes.OVERFLOW, settings=FP16,
                   model=behind("encoder.layers.encoder_layer_1.mlp.0", cubic_gelu),
                   place="encoder.layers.encoder_layer_1.mlp.0",
                   change="encoder.layers.encoder_layer_1.mlp.0 in fp32"),
    "structure": Cause(workload="vae", expected=causes.UNDERFLOW, added_loss=similar_at_scales,
                       place="(loss)", change="clamp"),
    "lerp": Cause(workload="radiodiff", expected=causes.REFUSED, settings=BF16,
                  model=behind("levels.0.block1.block1.proj", towards_their_mean),
                  place="levels.0.block1.block1.proj", change="levels.0.block1.block1.proj in fp32"),
    "burnt": Cause(workload="slotcontrast", expected=causes.BAD_INPUT, sample="3", prepared=burnt_pixel,
                   place="video", change="3"),
    "stash": Cause(workload="steve", expected=causes.OVERFLOW, model=behind("dvae.decoder.6", soft),
                   place="dvae.decoder.6", change="cast"),
    "gate": Cause(workload="gpt2", expected=causes.UNDERFLOW, settings=FP16,
                  model=behind("transformer.h.0.mlp.c_fc", forgotten),
                  place="transformer.h.0.mlp.c_fc", change="transformer.h.0.mlp.c_fc in fp32"),
}  # fmt: skip


def cold_contrast() -> Loop:
    """InfoNCE over raw embeddings at a temperature of 1e-3."""
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64))
    given = [{"one": x, "other": x + torch.randn(8, 16)} for x in (10 * torch.randn(8, 16) for _ in range(8))]

    def loss_fn(batch: Batch) -> Tensor:
        likeness = model(batch["one"]) @ model(batch["other"]).T / 1e-3
        return F.cross_entropy(likeness, torch.arange(8))

    options = {"precision": hs.Precision("fp16", simulate=True), "scaler": {"init_scale": 4.0}}
    return Loop(causes.OVERFLOW, model, loss_fn, given, options, place="(loss)", change="island")


def gradient_penalty() -> Loop:
    """Where no unit of the critic is alive, its gradient has length 0, and the root no slope."""
    critic = nn.Sequential(nn.Linear(16, 4), nn.ReLU(), nn.Linear(4, 1))

    def loss_fn(batch: Batch) -> Tensor:
        x = batch["x"].clone().requires_grad_()
        scores = critic(x)
        (slope,) = torch.autograd.grad(scores.sum(), x, create_graph=True)
        length = slope.square().sum(1).sqrt()
        return scores.mean() + 10 * (length - 1).square().mean()

    return Loop(causes.UNDERFLOW, critic, loss_fn, batches(), {}, place="(loss)", change="clamp")


def summed() -> Loop:
    """A loss that is summed over the batch and its targets, with the rate of one that is averaged."""
    model = network()

    def loss_fn(batch: Batch) -> Tensor:
        return F.mse_loss(model(batch["x"]), batch["x"][:, :4], reduction="sum")

    return Loop(causes.DIVERGED, model, loss_fn, batches(60), {}, 0.3, place="learning rate", change="learning rate")


class Standardised(nn.Module):
    def forward(self, image: Tensor) -> Tensor:
        middle, spread = image.mean((1, 2, 3), keepdim=True), image.std((1, 2, 3), keepdim=True)
        return (image - middle) / spread


def flat_image() -> Loop:
    """Standardised by its own spread, of which it has none."""
    model = nn.Sequential(Standardised(), nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 4))
    given = [{"image": torch.rand(8, 1, 8, 8), "y": torch.randint(0, 4, (8,))} for _ in range(8)]
    given[4]["image"][5] = 0.5
    return Loop(causes.UNDERFLOW, model, lambda b: F.cross_entropy(model(b["image"]), b["y"]), given, {},
                sample="row 5 of batch 0", place="planted_blind_again.py", change="denominator")  # fmt: skip


THIRD_IN_LOOPS: dict[str, Callable[[], Loop]] = {
    found.__name__: found for found in (cold_contrast, gradient_penalty, summed, flat_image)
}


def __getattr__(name: str) -> Kind:
    if name not in THIRD_IN_FAMILIES:
        raise AttributeError(name)
    return kind_of(THIRD_IN_FAMILIES[name])
