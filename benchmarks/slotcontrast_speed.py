"""SlotContrast at MOVi-E's size: one training step by stock PyTorch, written plainly and used well, and by halfstep.

    python benchmarks/slotcontrast_speed.py [--rows plain,plain_tuned,halfstep,halfstep_low,fifty_steps] [--out DIR]

ViT-B/14 frozen with random weights, 64 clips of 4 frames at 336 pixels from bytes of 128 pixels, 15 slots of 128. Every
row is a process of its own. Rows:

    plain         the same model with the decoder written layer by layer, autocast, Adam as it comes; the backbone is
                  under no_grad in autocast, as upstream
    plain_tuned   the same with torch.compile and fused Adam
    halfstep      `halfstep train` with train.fast=graph
    halfstep_low  the same with train.memory=low
    fifty_steps   a run of 50 steps on generated clips: how many of them were bad and skipped

Peak memory is the larger of max_memory_allocated before a capture and reserved memory after it. With `--at-once`
rows compile side by side and are timed one after the other (row_turns.py). `--small` is for trying this on a CPU.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from halfstep_train.bench.problem import load_bench_config
from halfstep_train.report.metrics_file import read
from halfstep_train.run.train import train
from halfstep_train.workloads import load
from halfstep_train.workloads.slots.build import build_backbone, build_model, make_prepare, make_random_batch
from halfstep_train.workloads.slots.config import SlotContrastConfig
from halfstep_train.workloads.slots.demo import write_demo
from halfstep_train.workloads.slots.scores import slot_contrast
from halfstep_train.workloads.slots.slotcontrast import SlotContrast
from recording import store
from row_turns import Turn
from step_rows import halfstep_row, rows, rows_parser, torch_row

ROWS = ("plain", "plain_tuned", "halfstep", "halfstep_low", "fifty_steps")
WARM_UP, STEPS, WINDOWS = 8, 10, 3
WORDS = ("preset=movi_e", "model.backbone_weights=random")
SMALL = (
    "data.image_size=28", "model.backbone=vit_small_patch14_dinov2", "model.backbone_depth=1", "model.backbone_dim=48",
    "model.slots=3", "model.slot_dim=16", "model.decoder_hidden=[32,32]", "train.batch_size=2",
)  # fmt: skip


def main() -> None:
    parser = rows_parser(__doc__, ROWS)
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--batch-size", type=int, default=64)
    arguments = parser.parse_args()
    if arguments.row:
        run = by_halfstep if arguments.row.startswith("halfstep") else by_torch
        run = in_a_run if arguments.row == "fifty_steps" else run
        print(json.dumps(run(arguments.row, arguments)))
        return
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found = []
    common = ["--precision", arguments.precision, "--batch-size", str(arguments.batch_size)]
    common += [f"--{name}" for name in ("small", "profile") if getattr(arguments, name)]
    jobs = [["--row", row, *common] for row in arguments.rows.split(",")]
    for words, result in rows(__file__, jobs, at_once=arguments.at_once, seconds=arguments.seconds):
        found.append({"row": words[1], **result})
        print(json.dumps(found[-1]), flush=True)
        store("slotcontrast_speed", {"precision": arguments.precision, "rows": found}, device, arguments.out)


def words_of(row: str, arguments: argparse.Namespace) -> tuple[str, ...]:
    low = ("train.memory=low", "train.max_steps=10000") if row == "halfstep_low" else ()
    return (*WORDS, *(SMALL if arguments.small else (f"train.batch_size={arguments.batch_size}",)), *low)


def by_halfstep(row: str, arguments: argparse.Namespace) -> dict[str, Any]:
    config = load_bench_config("slotcontrast", words_of(row, arguments), {}, small=False)
    return halfstep_row(config, arguments.precision, profiles=arguments.profile)


def in_a_run(row: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """By `halfstep train`, on clips of which each is seen once."""
    with tempfile.TemporaryDirectory() as scratch:
        write_demo(Path(scratch) / "clips", num_train=arguments.batch_size, num_val=1, frames=8)
        words = (
            *words_of(row, arguments), f"precision={arguments.precision}", f"data.dir={scratch}/clips",
            "data.num_workers=4", "train.fast=graph", "train.max_steps=50", "train.validate_every_steps=0",
            "train.validate_every=1000", "train.val_batch_size=1", "schedule.warmup_steps=10", "log.quiet=true",
        )  # fmt: skip
        run = train(load("slotcontrast", overrides=list(words)), out=Path(scratch) / "run")
        steps = [record for record in read(run / "metrics.jsonl") if record["kind"] == "train"]
    peak = max(record["memory_bytes"] or 0 for record in steps)
    first, last = steps[0], steps[-1]
    return {"skipped": last["skipped"], "first_loss": first["loss"], "loss": last["loss"], "peak_gb": peak / 1e9}


def plain_error(model: SlotContrast, slots: Tensor, target: Tensor) -> Tensor:
    """The decoder layer by layer, all frames at once, as upstream writes it."""
    out = model.decoder.mlp(slots.unsqueeze(2) + model.decoder.pos_emb)
    recons, alpha = out.split((model.decoder.feature_dim, 1), dim=-1)
    painted = (recons * torch.softmax(alpha, dim=1)).sum(1)
    return nn.functional.mse_loss(painted.float(), target.float())


def by_torch(row: str, arguments: argparse.Namespace) -> dict[str, Any]:
    torch.manual_seed(0)
    turn = Turn()
    turn.begin()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = load_bench_config("slotcontrast", words_of(row, arguments), {}, small=False)
    assert isinstance(config, SlotContrastConfig)
    backbone = build_backbone(config).module.to(device).eval()
    model = build_model(config, backbone).to(device).train()
    is_tuned = row == "plain_tuned"
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-4, fused=is_tuned)
    prepare, batch = make_prepare(config), make_random_batch(config, {})
    host = batch["video"].pin_memory() if device.type == "cuda" else batch["video"]

    def loss_of(video: Tensor) -> Tensor:
        with torch.no_grad():
            features = backbone(video.flatten(0, 1)).unflatten(0, video.shape[:2])
        slots = model.processor(model.initializer(len(video), None), model.encoder(features)).slots
        error = plain_error(model, slots.flatten(0, 1), features.flatten(0, 1))
        return error + 0.5 * slot_contrast(slots, temperature=0.1, across_batch=True)

    def batch_of() -> Tensor:
        return prepare({"video": host.to(device, non_blocking=True)}, key=(0,), training=True)["video"]

    run = torch.compile(loss_of) if is_tuned else loss_of
    counts = (2, 2, WINDOWS) if arguments.small else (WARM_UP, STEPS, WINDOWS)
    return torch_row(
        batch_of, run, model, optimizer, turn, precision=arguments.precision, counts=counts, clip_norm=0.05
    )


if __name__ == "__main__":
    main()
