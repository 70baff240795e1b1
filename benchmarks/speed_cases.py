"""The problems of speed.py, what is to be reached on each, and how one of their rows is set up."""

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
class Goal:
    """What is to be reached on one H200."""

    ms: float | None = None
    over_documented: float | None = None
    """How many times as fast as the best peer as documented with the compiler."""
    over_tuned: float | None = None
    gb: float | None = None
    """Peak memory, at no more than `extra_time` over the case `beside`."""
    beside: str = ""
    extra_time: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One row of the README's table."""

    title: str
    workload: str
    batch_size: int
    image_size: int | None
    """None where samples are no images."""
    goal: Goal
    precision: str = "bf16"
    words: tuple[str, ...] = ()
    against: tuple[str, ...] = PEERS


UNET = Case(
    title="U-Net 31M, 512×512, 8",
    workload="unet",
    batch_size=8,
    image_size=512,
    goal=Goal(ms=20.5, over_documented=2.0, over_tuned=1.27),
)

CASES = {
    "unet": UNET,
    "unet_low_memory": replace(
        UNET,
        title=f"{UNET.title}, train.memory=low",
        words=("train.memory=low",),
        against=(),
        goal=Goal(gb=3.9, beside="unet", extra_time=0.10),
    ),
    "resnet50_64": Case(
        title="ResNet-50, 224, 64",
        workload="resnet50",
        batch_size=64,
        image_size=224,
        goal=Goal(ms=11, over_documented=2.6, over_tuned=2.1),
    ),
    "resnet50_256": Case(
        title="ResNet-50, 224, 256",
        workload="resnet50",
        batch_size=256,
        image_size=224,
        goal=Goal(ms=33, over_documented=1.28, over_tuned=1.24),
    ),
    "vit_l_64": Case(title="ViT-L/16, 224, 64", workload="vit_l_16", batch_size=64, image_size=224, goal=Goal(ms=46)),
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
