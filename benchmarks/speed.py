"""halfstep against plain PyTorch, Lightning and Accelerate: one training step in bf16, same model, batch and clipping.

    python benchmarks/speed.py [--only unet,resnet50_64] [--seconds 540] [--ways auto] [--out DIR]

Each peer runs as documented with the compiler on, and once more tuned by hand. Every problem starts with an empty
compiler cache, so the first row's start is a cold one; that row is measured again at the end, from a warm cache, which
also shows whether the machine drifted. Problems that are not run now keep what the file has of them.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from recording import RESULTS, command, store
from rich.console import Console

from halfstep.bench.bench import Request, bench
from halfstep.bench.compile_cache import empty_cache
from halfstep.bench.floor import step_flops
from halfstep.bench.laps import Schedule
from halfstep.bench.problem import problem_for
from halfstep.bench.record import circumstances, results
from halfstep.bench.settings import bench_config
from halfstep.hardware.facts import Hardware
from halfstep.hardware.measure import measure
from halfstep.hardware.probe import probe
from halfstep.report.bench_table import show_bench

PEERS = ("plain", "lightning", "accelerate")
SCHEDULE = Schedule(warm_up=10, ramp=2, window=15)


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One row of the README's table."""

    title: str
    workload: str
    batch_size: int
    image_size: int
    words: tuple[str, ...] = ()
    against: tuple[str, ...] = PEERS


CASES = {
    "unet": Case(title="U-Net 31M, 512×512, 8", workload="unet", batch_size=8, image_size=512),
    "unet_low_memory": Case(
        title="U-Net 31M, 512×512, 8, train.memory=low",
        workload="unet",
        batch_size=8,
        image_size=512,
        words=("train.memory=low",),
        against=(),
    ),
    "resnet50_64": Case(title="ResNet-50, 224, 64", workload="resnet50", batch_size=64, image_size=224),
    "resnet50_256": Case(title="ResNet-50, 224, 256", workload="resnet50", batch_size=256, image_size=224),
    "vit_l_64": Case(title="ViT-L/16, 224, 64", workload="vit_l_16", batch_size=64, image_size=224),
}


def measured(case: Case, ways: tuple[Any, ...], hardware: Hardware, deadline: float | None) -> dict[str, Any]:
    """One case's rows, as `halfstep bench --save` would write them."""
    size = {"batch_size": case.batch_size, "image_size": case.image_size}
    problem = problem_for(bench_config(case.workload, case.words, size, small=False), torch.device(hardware.device))
    request = Request(
        precisions=("bf16",), ways=ways, against=case.against, schedule=SCHEDULE, repeat_first=True, deadline=deadline
    )
    flops = step_flops(problem)
    with empty_cache():
        benched = bench(
            problem, request, hardware, flops, lambda row: print(f"{time.strftime('%X')} {row}", flush=True)
        )
    return {**circumstances(problem, request, hardware, flops, command()), **results(benched), "title": case.title}


def tell(row: str) -> None:
    print(f"{time.strftime('%X')} {row}", flush=True)


def stored_problems(folder: str | None, hardware: Hardware) -> dict[str, Any]:
    """What an earlier call measured on the same device with the same torch."""
    path = Path(folder or RESULTS) / "speed.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    is_same = (found.get("device"), found.get("torch")) == (hardware.name, torch.__version__)
    return dict(found["problems"]) if is_same else {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(CASES), help=f"of {', '.join(CASES)}")
    parser.add_argument("--ways", default="auto", help="eager, compile, graph or auto, several with commas")
    parser.add_argument("--seconds", type=float, help="no row starts after so many")
    parser.add_argument("--out", help="folder for the JSON, default benchmarks/results")
    arguments = parser.parse_args()
    names = arguments.only.split(",")
    if unknown := set(names) - set(CASES):
        parser.error(f"--only knows {', '.join(CASES)}, not {', '.join(sorted(unknown))}")
    deadline = time.monotonic() + arguments.seconds if arguments.seconds else None
    hardware = measure(probe("cuda"))
    problems = stored_problems(arguments.out, hardware)
    for name in names:
        problems[name] = measured(CASES[name], tuple(arguments.ways.split(",")), hardware, deadline)
        show_bench(problems[name], Console(width=200))
        # After each, for a machine that may end the run.
        store("speed", {"problems": problems}, torch.device(hardware.device), arguments.out)


if __name__ == "__main__":
    main()
