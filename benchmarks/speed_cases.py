"""The problems of speed.py, and how one of their rows is set up."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from halfstep.hardware.device_facts import Hardware
from halfstep_train.bench.bench import BenchRequest
from halfstep_train.bench.measure_row import Schedule
from halfstep_train.bench.peers import list_variants, parse_peer_name
from halfstep_train.bench.problem import Problem, build_problem, load_bench_config
from halfstep_train.config.schema import RunConfig

PEERS = ("plain:tuned", "plain:graphs", "lightning:documented", "lightning:tuned", "accelerate:documented")
"""`graphs` is plain's tuned loop with the compiler's own CUDA graphs (mode reduce-overhead). Left out to save time:
Accelerate tuned, which compiles the very step of `plain:tuned`, and plain as documented, which has no page."""
SCHEDULE = Schedule(warm_up=10, ramp=2, window=15)


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One model, its size and its peers."""

    title: str
    workload: str
    batch_size: int
    image_size: int | None
    """None where samples are no images."""
    precision: str = "bf16"
    words: tuple[str, ...] = ()
    against: tuple[str, ...] = PEERS
    baseline: str = ""
    """Name of a case that is measured in the same invocation, for comparison."""


UNET = Case(title="U-Net 31M, 512×512, 8", workload="unet", batch_size=8, image_size=512)
TABLE = {
    "unet": UNET,
    "unet_low_memory": replace(
        UNET, title=f"{UNET.title}, train.memory=low", words=("train.memory=low",), against=(), baseline="unet"
    ),
    "resnet50_64": Case(title="ResNet-50, 224, 64", workload="resnet50", batch_size=64, image_size=224),
    "resnet50_256": Case(title="ResNet-50, 224, 256", workload="resnet50", batch_size=256, image_size=224),
    "vit_l_64": Case(title="ViT-L/16, 224, 64", workload="vit_l_16", batch_size=64, image_size=224),
}
"""The first table of docs/results.md."""


def make_plain_case(
    title: str, workload: str, batch_size: int, *words: str, image_size: int | None = None, precision: str = "bf16"
) -> Case:
    """Return a case whose peers are plain loops, without and with tuning by hand."""
    peers = ("plain:documented", "plain:tuned") if precision == "bf16" else ()
    return Case(title=title, workload=workload, batch_size=batch_size, image_size=image_size, words=words,
                precision=precision, against=peers)  # fmt: skip


EIGHT_BIT = "optimizer.moment_bits=8"
CASES = TABLE | {
    "ddpm": make_plain_case("DDPM U-Net 114M, 64×64, 64", "diffusion", 64, "ema.enabled=true", image_size=64),
    "vae": make_plain_case("VAE of SD's size, 256 pixels, 4", "vae", 4, "ema.enabled=true", image_size=256),
    "radiodiff": make_plain_case("RadioDiff, second stage, 256 pixels, 8", "radiodiff", 8, "model.scale_factor=0.3"),
    "slotcontrast": make_plain_case(
        "SlotContrast, MOVi-E's size, 64", "slotcontrast", 64, "preset=movi_e", "model.backbone_weights=random"
    ),
    "steve": make_plain_case("STEVE, published settings, 24", "steve", 24),
    "gpt2": make_plain_case("GPT-2 124M, 16×1024", "gpt2", 16),
    "gpt2_xl": make_plain_case("GPT-2 XL 1.56B, 4×1024", "gpt2_xl", 4),
    "gpt2_xl_split": make_plain_case(
        "GPT-2 XL, bf16-true, split master, 8-bit moments", "gpt2_xl", 4, EIGHT_BIT, precision="bf16-true"
    ),
}


def config_of(case: Case) -> RunConfig:
    size = {"batch_size": case.batch_size, "image_size": case.image_size}
    size = {name: value for name, value in size.items() if value is not None}
    return load_bench_config(case.workload, case.words, size, small=False)


def problem_of(case: Case, hardware: Hardware) -> Problem:
    """The case with its weights and its batch."""
    return build_problem(config_of(case), torch.device(hardware.device))


def request_of(case: Case, modes: tuple[Any, ...], deadline: float | None = None) -> BenchRequest:
    """Its rows."""
    return BenchRequest(
        precisions=(case.precision,), modes=modes, against=case.against, schedule=SCHEDULE, deadline=deadline
    )


def row_requests(case: Case, modes: tuple[Any, ...]) -> dict[str, BenchRequest]:
    """A request of its own for each row, under the row's name."""
    ours = {f"halfstep {mode}": request_of(replace(case, against=()), (mode,)) for mode in modes}
    peers = [(parse_peer_name(word), variant) for word in case.against for variant in list_variants(word)]
    return ours | {
        f"{name} {variant}": request_of(replace(case, against=(f"{name}:{variant}",)), ()) for name, variant in peers
    }
