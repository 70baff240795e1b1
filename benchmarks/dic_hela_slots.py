"""Slots on real cells: DIC-C2DH-HeLa of the Cell Tracking Challenge, trained on sequence 01, scored on sequence 02.

    python benchmarks/dic_hela_slots.py DATA_DIR [--workload slotcontrast] [--seeds 1] [--out DIR] [KEY=VALUE ...]

DATA_DIR holds 01/ and 02/, each with frames/ and instances/ (a number for each cell, 0 is none). Printed and stored are
FG-ARI and mBO of the trained model's slots, of the untrained ones, and of k-means with as many clusters on the same
features and on pixels, with and without coordinates. slotcontrast has no DINOv2 weights here, but the fixed filters of
its demo. KEY=VALUE words go to `halfstep train`; model.backbone_weights=FILE with model.backbone=… is the real thing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from halfstep_train.report.metrics_file import read
from halfstep_train.run.assemble import build_workload
from halfstep_train.run.train import train
from halfstep_train.workloads import load
from halfstep_train.workloads.slots.clusters import On, score_k_means, score_untrained
from recording import store

SCORES = ("fg_ari", "fg_ari_image", "mbo", "mbo_image", "loss")
COMMON = ("data.val_videos=[02]", "data.num_workers=0", "train.validate_every_steps=0", "train.validate_every=10000")
WORDS = {
    "slotcontrast": (
        "data.image_size=128", "data.chunk_size=2", "data.chunks=all", "data.val_chunk_size=6", "data.flip=0.5",
        "model.backbone=filters", "model.patch=8", "model.slots=12", "model.slot_dim=32",
        "model.decoder_hidden=[128,128]", "model.contrast_weight=0.1", "optimizer.lr=2e-3", "schedule.warmup_steps=100",
        "schedule.half_life_steps=1000", "train.clip_norm=1", "train.batch_size=8", "train.max_steps=1000",
    ),
    "steve": (
        "data.image_size=64", "data.chunk_size=2", "model.vocabulary=64", "model.slots=12", "model.slot_dim=32",
        "model.cnn_channels=32", "model.mlp_dim=64", "model.dim=32", "model.decoder_blocks=2", "train.batch_size=8",
        "schedule.warmup_steps=50", "train.max_steps=300",
    ),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--workload", choices=sorted(WORDS), default="slotcontrast")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--out", help="folder for the JSON, default benchmarks/results")
    parser.add_argument("words", nargs="*", help="settings of halfstep train")
    arguments = parser.parse_intermixed_args()
    said = {word.partition("=")[0] for word in arguments.words}
    own = [word for word in (*COMMON, *WORDS[arguments.workload]) if word.partition("=")[0] not in said]
    words = [f"data.dir={arguments.data}", *own, *arguments.words]
    rows: dict[str, Any] = {"trained": []}
    for seed in range(arguments.seeds):
        with tempfile.TemporaryDirectory() as scratch:
            loaded = load(arguments.workload, overrides=[*words, f"train.seed={seed}"])
            run = train(loaded, out=Path(scratch) / "run")
            last = [record for record in read(run / "metrics.jsonl") if record["kind"] == "val"][-1]
        rows["trained"].append(kept(last))
    workload = build_workload(loaded.config)
    rows["untrained"] = kept(score_untrained(workload))
    if arguments.workload == "slotcontrast":
        rows |= k_means_rows(workload, loaded.config.model.slots)
    for name, found in rows.items():
        print(name, json.dumps(found))
    mean = statistics.mean(found["fg_ari"] for found in rows["trained"])
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    sys.argv = [
        "DATA_DIR" if word == str(arguments.data) else word for word in sys.argv
    ]  # what is stored names no path
    results = {"fg_ari": mean, "rows": rows, "settings": [word for word in words if not word.startswith("data.dir")]}
    store(f"dic_hela_{arguments.workload}", results, device, arguments.out)


def k_means_rows(workload: Any, slots: int) -> dict[str, Any]:
    on: list[On] = ["features", "pixels"]
    return {
        f"k-means on {what}{' with coordinates' if with_it else ''}": kept(
            score_k_means(workload, slots, on=what, coordinates=with_it)
        )
        for what in on
        for with_it in (False, True)
    }


def kept(found: dict[str, Any]) -> dict[str, float]:
    return {name: round(found[name], 4) for name in SCORES if name in found}


if __name__ == "__main__":
    main()
