"""Diffusion models: one training step by diffusers' networks in a plain loop, in one used well, and by halfstep.

    python benchmarks/diffusion_speed.py [--only sd_unet,ddpm,vae] [--rows plain,tuned,halfstep] [--seconds 900]

Every row is a process of its own: what one compiled or reserved must not help or hurt the next. With `--at-once` rows
compile side by side and are timed one after the other (row_turns.py); `--profile` adds where halfstep's time goes.
AdamW, clipping to 1, an average of the weights at every step; rows differ in nothing else but what their names say:

    plain     autocast, AdamW as it comes, the average by a loop over tensors
    tuned     the same with torch.compile of model and loss, fused AdamW, one fused update of the average
    halfstep  `halfstep train` with train.fast=graph

Peak memory is the larger of max_memory_allocated before a capture and reserved memory after it.
`--small` is for trying the script on a CPU.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from diffusers import DDPMScheduler
from torch import Tensor
from torch.nn import functional as F

from halfstep_train.bench.problem import load_bench_config
from halfstep_train.data.loader import Samples
from halfstep_train.models.posterior import kl_divergence, split_moments
from halfstep_train.workloads.base.kind import Kind, SampleUnit, Store, SyntheticData
from halfstep_train.workloads.base.workload import Batch, Workload
from halfstep_train.workloads.diffusion.build import FRAGILE, DiffusionForward, DiffusionPrepare
from halfstep_train.workloads.diffusion.config import DiffusionConfig
from halfstep_train.workloads.diffusion.diffusers_blocks import find_blocks
from halfstep_train.workloads.diffusion.diffusers_nets import build_net, make_unet_config, make_vae_config
from halfstep_train.workloads.diffusion.networks import Conditions, DiffusionParts, build_unet
from halfstep_train.workloads.diffusion.scores import DenoisingMetrics, denoising_loss
from recording import store
from row_turns import Turn
from step_rows import halfstep_row, rows, rows_parser, torch_row

WARM_UP, STEPS, WINDOWS = 8, 15, 3
TOKENS, TEXT_DIM, LATENT = 77, 768, (4, 64, 64)
DECAY = 0.9999
ROWS = ("plain", "tuned", "halfstep")
COMMON = ("ema.enabled=true", "schedule.warmup_steps=0")


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One line of the table."""

    title: str
    workload: str
    words: tuple[str, ...]
    small: tuple[str, ...]
    batch_size: int
    precisions: tuple[str, ...] = ("bf16",)


CASES = {
    "sd_unet": Case(
        title="SD 1.x U-Net 860M, 4×64×64",
        workload="diffusion_speed:SD_UNET",
        words=("model.channels=[320, 640, 1280, 1280]", "model.attention=[0, 1, 2]", "noise.schedule=scaled_linear"),
        small=("model.channels=[32, 64]", "model.attention=[0]"),
        batch_size=8,
        precisions=("bf16", "fp32", "tf32", "fp16"),
    ),
    "ddpm": Case(
        title="DDPM U-Net 114M, 64×64",
        workload="diffusion",
        words=("data.image_size=64",),
        small=("data.image_size=16", "model.channels=[32, 64]"),
        batch_size=64,
    ),
    "vae": Case(
        title="VAE of SD's size, 256 pixels",
        workload="vae",
        words=("data.image_size=256",),
        small=("data.image_size=16", "model.channels=[32, 64]"),
        batch_size=4,
    ),
}


def main() -> None:
    parser = rows_parser(__doc__, ROWS, "CASE", "ROW", "PRECISION")
    parser.add_argument("--only", default=",".join(CASES))
    parser.add_argument("--precisions", default="", help="of those a case has; all unless given")
    arguments = parser.parse_args()
    if arguments.row:
        name, row, precision = arguments.row
        run = by_halfstep if row == "halfstep" else by_torch
        print(json.dumps(run(name, row, precision, arguments)))
        return
    if unknown := set(arguments.only.split(",")) - set(CASES):
        parser.error(f"there are {', '.join(CASES)}, not {', '.join(sorted(unknown))}")
    all_rows(arguments)


def all_rows(arguments: argparse.Namespace) -> None:
    found = dict[str, Any]()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    flags = [f"--{name}" for name in ("small", "profile") if getattr(arguments, name)]
    jobs = [["--row", name, row, precision, *flags] for name, row, precision in asked_for(arguments)]
    for words, result in rows(__file__, jobs, at_once=arguments.at_once, seconds=arguments.seconds):
        _, name, row, precision, *_ = words
        found.setdefault(name, {"title": CASES[name].title, "rows": []})["rows"].append(
            {"row": row, "precision": precision, **result}
        )
        print(
            name,
            row,
            precision,
            json.dumps({key: value for key, value in result.items() if key != "profile"}),
            flush=True,
        )
        store("diffusion_speed", {"cases": found}, device, arguments.out)


def asked_for(arguments: argparse.Namespace) -> Iterator[tuple[str, str, str]]:
    rows, precisions = arguments.rows.split(","), arguments.precisions.split(",") if arguments.precisions else None
    for name in arguments.only.split(","):
        for precision in CASES[name].precisions:
            if precisions is None or precision in precisions:
                yield from ((name, row, precision) for row in ROWS if row in rows)


# --- Stable Diffusion's U-Net alone, on latents and states of text that cost nobody anything ---


class GivenStates(Conditions):
    """States of text that come with the batch."""

    text_dim = TEXT_DIM

    def keywords(self, batch: Batch) -> dict[str, Tensor]:
        return {"encoder_hidden_states": batch["states"]}


def sd_store(config: DiffusionConfig) -> dict[str, Any]:
    return {"classes": []}


def sd_batch(config: DiffusionConfig, store: Store) -> Batch:
    generator, size = torch.Generator().manual_seed(0), config.train.batch_size
    return {
        "image": torch.randn(size, *latent_of(config), generator=generator),
        "states": torch.randn(size, TOKENS, TEXT_DIM, generator=generator),
        "index": torch.arange(size),
    }


def sd_over(config: DiffusionConfig, store: Store, samples: Samples) -> Workload:
    parts = DiffusionParts(conditions=GivenStates(), vae=None, vae_source="", shape=latent_of(config))
    model = build_unet(config, parts)
    return Workload(
        name=config.workload,
        model=model,
        train_samples=samples,
        val_samples=samples,
        prepare=DiffusionPrepare(config, parts),
        forward=DiffusionForward(config, parts),
        loss=denoising_loss,
        metrics=lambda: DenoisingMetrics(config.noise.steps),
        metric="mse",
        mode="min",
        fragile=FRAGILE,
        blocks=find_blocks(model),
        store=store,
    )


def latent_of(config: DiffusionConfig) -> tuple[int, int, int]:
    return LATENT if len(config.model.channels) > 2 else (4, 8, 8)


SD_UNET = Kind(
    takes_channels_last=True,
    builder=sd_over,
    config=DiffusionConfig,
    synthetic=SyntheticData(store=sd_store, batch=sd_batch, over=sd_over),
    sample=SampleUnit(name="image"),
)


# --- halfstep ---


def config_of(name: str, small: bool) -> Any:
    case = CASES[name]
    words = (*COMMON, *(case.small if small else case.words))
    return load_bench_config(case.workload, words, {"batch_size": 2 if small else case.batch_size}, small=False)


def by_halfstep(name: str, row: str, precision: str, arguments: argparse.Namespace) -> dict[str, Any]:
    return halfstep_row(config_of(name, arguments.small), precision, warm_up=8, profiles=arguments.profile)


# --- diffusers' networks in a loop of torch's ---


def by_torch(name: str, row: str, precision: str, arguments: argparse.Namespace) -> dict[str, Any]:
    torch.manual_seed(0)
    turn, small = Turn(), arguments.small
    turn.begin()
    torch.backends.cudnn.benchmark = True
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision != "fp32"
    is_tuned = row == "tuned"
    model, loss_of, host = made(name, small)
    model = model.to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01, fused=is_tuned)
    run = torch.compile(lambda batch: loss_of(model, batch)) if is_tuned else lambda batch: loss_of(model, batch)
    weights = [parameter.detach() for parameter in model.parameters()]
    shadows = [weight.clone() for weight in weights]
    host = {key: value.pin_memory() if device.type == "cuda" else value for key, value in host.items()}
    counts = (2, 2, WINDOWS) if small else (WARM_UP, STEPS, WINDOWS)
    return torch_row(
        lambda: {key: value.to(device, non_blocking=True) for key, value in host.items()}, run, model, optimizer, turn,
        precision=precision, counts=counts, after_step=lambda: averaged_(shadows, weights, fused=is_tuned),
    )  # fmt: skip


@torch.no_grad()
def averaged_(shadows: list[Tensor], weights: list[Tensor], *, fused: bool) -> None:
    if fused:
        torch._foreach_lerp_(shadows, weights, 1 - DECAY)
        return
    for shadow, weight in zip(shadows, weights, strict=True):
        shadow.sub_((1 - DECAY) * (shadow - weight))


Loss = Callable[[Any, dict[str, Tensor]], Tensor]


def made(name: str, small: bool) -> tuple[Any, Loss, dict[str, Tensor]]:
    """diffusers' network, its loss as diffusers' examples write it, and a batch on the host."""
    config = config_of(name, small)
    size, side, channels = config.train.batch_size, config.data.image_size, config.model.channels
    if name == "vae":
        form = make_vae_config(channels=channels, layers=2, latent_channels=4, image_size=side)
        return build_net(form), vae_loss, {"image": torch.rand(size, 3, side, side) * 2 - 1}
    shape = latent_of(config) if name == "sd_unet" else (3, side, side)
    form = make_unet_config(
        sample_size=shape[1],
        sample_channels=shape[0],
        channels=channels,
        layers=2,
        attention=config.model.attention,
        attention_head_dim=8,
        text_dim=TEXT_DIM if name == "sd_unet" else 0,
    )
    scheduler = DDPMScheduler(num_train_timesteps=1000)
    tables = scheduler.alphas_cumprod

    def loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
        image = batch["image"]
        noise = torch.randn_like(image)
        timestep = torch.randint(1000, (len(image),), device=image.device)
        left = batch["alpha_bar"][timestep].view(-1, 1, 1, 1)
        noisy = left.sqrt() * image + (1 - left).sqrt() * noise
        told = {"encoder_hidden_states": batch["states"]} if "states" in batch else {}
        return F.mse_loss(model(noisy, timestep, **told, return_dict=False)[0].float(), noise)

    batch = {"image": torch.randn(size, *shape), "alpha_bar": tables}
    return build_net(form), loss, batch | ({"states": torch.randn(size, TOKENS, TEXT_DIM)} if name == "sd_unet" else {})


def vae_loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
    image = batch["image"]
    mean, logvar = split_moments(model.encode(image).latent_dist.parameters)
    made_image = model.decode(mean + (0.5 * logvar).exp() * torch.randn_like(mean)).sample
    return (made_image.float() - image).abs().mean() + 1e-6 * kl_divergence(mean, logvar).mean()


if __name__ == "__main__":
    main()
