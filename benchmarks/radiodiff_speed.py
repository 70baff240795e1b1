"""RadioDiff's second stage: one training step by our model in a plain loop, in one used well, and by halfstep.

    python benchmarks/radiodiff_speed.py [--rows plain,tuned,halfstep] [--precisions bf16,fp16,fp32] [--stage 2]

The published size: 256 pixels, batch 8, the Swin-B pyramid, the frozen autoencoder's encoder inside the step, AdamW,
clipping to 1, an average of the weights at every step. `--stage 1` is the autoencoder alone (no discriminator). Every
row is a process of its own; with `--at-once` rows compile side by side and are timed one by one (row_turns.py).
`--profile` adds where halfstep's time goes. Rows:

    plain     autocast, AdamW as it comes, the average by a loop over tensors
    tuned     the same with torch.compile, fused AdamW and one fused update of the average
    halfstep  `halfstep train` with train.fast=graph

Peak memory is the larger of max_memory_allocated before a capture and reserved memory after it. `--small` is for trying
the script on a CPU.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import torch
from torch import Tensor, nn

from halfstep_train.bench.problem import load_bench_config
from halfstep_train.config.schema import RunConfig
from halfstep_train.workloads import KINDS
from halfstep_train.workloads.base.workload import Batch, Workload
from recording import store
from row_turns import Turn
from step_rows import halfstep_row, rows, rows_parser, torch_row

ROWS = ("plain", "tuned", "halfstep")
WARM_UP, STEPS, WINDOWS = 8, 10, 3
DECAY = 0.999
WORKLOADS = {"2": "radiodiff", "1": "radiodiff_vae"}
COMMON = ("train.batch_size=8", "model.scale_factor=0.3")
STAGE1 = ("train.batch_size=8", "model.discriminator.enabled=false")
SMALL = (
    "data.image_size=32", "model.first_stage.width=8", "model.first_stage.num_blocks=1",
)  # fmt: skip
SMALL_UNET = (
    "model.width=8", "model.multipliers=[1, 2]", "model.windows=[[2, 2], [1, 1]]",
    "model.feature_windows=[[2, 2], [1, 1]]",
    "model.pyramid.width=8", "model.pyramid.depths=[1, 1]", "model.pyramid.num_heads=[1, 2]", "model.pyramid.window=4",
)  # fmt: skip


def main() -> None:
    parser = rows_parser(__doc__, ROWS, "ROW", "PRECISION")
    parser.add_argument("--precisions", default="bf16")
    parser.add_argument("--stage", choices=sorted(WORKLOADS), default="2")
    arguments = parser.parse_args()
    if arguments.row:
        row, precision = arguments.row
        run = by_halfstep if row == "halfstep" else by_torch
        print(json.dumps(run(row, precision, config_of(arguments), arguments)))
        return
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found = []
    flags = [f"--{name}" for name in ("small", "profile") if getattr(arguments, name)]
    asked = [(row, precision) for precision in arguments.precisions.split(",") for row in arguments.rows.split(",")]
    jobs = [["--row", row, precision, "--stage", arguments.stage, *flags] for row, precision in asked]
    for words, result in rows(__file__, jobs, at_once=arguments.at_once, seconds=arguments.seconds):
        found.append({"row": words[1], "precision": words[2], **result})
        print(json.dumps({name: value for name, value in found[-1].items() if name != "profile"}), flush=True)
        store(f"radiodiff{arguments.stage}_speed", {"rows": found}, device, arguments.out)


def config_of(arguments: argparse.Namespace) -> RunConfig:
    words = COMMON if arguments.stage == "2" else STAGE1
    if arguments.small:
        words = (*words, *SMALL, *(SMALL_UNET if arguments.stage == "2" else ()))
    return load_bench_config(WORKLOADS[arguments.stage], words, {}, small=False)


def by_halfstep(row: str, precision: str, config: RunConfig, arguments: argparse.Namespace) -> dict[str, Any]:
    return halfstep_row(config, precision, profiles=arguments.profile)


def by_torch(row: str, precision: str, config: RunConfig, arguments: argparse.Namespace) -> dict[str, Any]:
    """Our model as a user of plain PyTorch would train it; islands stay, since they are part of the model."""
    torch.manual_seed(0)
    turn = Turn()
    turn.begin()
    device, is_tuned = torch.device("cuda" if torch.cuda.is_available() else "cpu"), row == "tuned"
    torch.backends.cudnn.benchmark = True
    kind = KINDS[config.workload]
    made: Any = kind.synthetic.make_store(config)
    workload: Workload = kind.synthetic.build(config, made, [])
    for part in workload.frozen.values():
        part.module.to(device).eval().requires_grad_(False)
    model = workload.model.to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5, weight_decay=1e-4, fused=is_tuned)
    average = [parameter.detach().clone() for parameter in model.parameters()]
    loaded = kind.make_batch(config, made)
    host = {name: value.pin_memory() if device.type == "cuda" else value for name, value in loaded.items()}

    def loss_of(batch: Batch) -> Tensor:
        return workload.compute_loss(workload.forward(model, batch), batch)[0]

    def batch_of() -> Batch:
        placed = {name: value.to(device, non_blocking=True) for name, value in host.items()}
        return workload.prepare_batch(placed, key=(0, 0), training=True)

    run = torch.compile(loss_of) if is_tuned else loss_of
    counts = (1, 2, WINDOWS) if arguments.small else (WARM_UP, STEPS, WINDOWS)
    return torch_row(
        batch_of, run, model, optimizer, turn, precision=precision, counts=counts,
        after_step=lambda: averaged(average, list(model.parameters()), fused=is_tuned),
    )  # fmt: skip


@torch.no_grad()
def averaged(average: list[Tensor], weights: list[nn.Parameter], *, fused: bool) -> None:
    if fused:
        torch._foreach_lerp_(average, [weight.detach() for weight in weights], 1 - DECAY)
        return
    for mean, weight in zip(average, weights, strict=True):
        mean.mul_(DECAY).add_(weight.detach(), alpha=1 - DECAY)


if __name__ == "__main__":
    main()
