"""Does low precision cost accuracy? U-Net on real electron-microscopy slices, paired seeds, by `halfstep train`.

    python benchmarks/unet_parity.py --data DIR [--precisions fp32,bf16,fp16] [--seeds 5] [--steps 150] [--out DIR]

DIR holds `image/` and `label/` (ISBI 2012: 30 slices of 512x512). The last six slices are held out, not random ones:
neighbouring slices of one volume are nearly the same picture. On a CPU add --simulate and small sizes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from equivalence import equivalence
from recording import store

from halfstep.config.load import from_dict
from halfstep.report.metrics_file import read
from halfstep.run.train import train

HELD_OUT = 6


def validation_list(data: Path, folder: Path) -> Path:
    names = sorted(
        (path.name for path in (data / "image").iterdir()), key=lambda n: int("".join(filter(str.isdigit, n)))
    )
    path = folder / "held_out.txt"
    path.write_text("\n".join(names[-HELD_OUT:]) + "\n")
    return path


def one_run(arguments: argparse.Namespace, precision: str, seed: int, folder: Path) -> dict[str, Any]:
    config = {
        "data.dir": arguments.data, "data.val_list": str(validation_list(Path(arguments.data), folder)),
        "data.image_size": arguments.size, "data.num_workers": 0, "model.base_channels": arguments.width,
        "precision": precision, "precision.simulate": arguments.simulate and precision != "fp32",
        "precision.strict": True, "train.batch_size": arguments.batch, "train.max_steps": arguments.steps,
        "train.epochs": 10_000, "train.validate_every": 10_000, "train.seed": seed, "train.checkpoint_every": 100_000,
        "train.early_stopping_patience": 0, "log.quiet": True,
    }  # fmt: skip
    start = time.perf_counter()
    run = train(from_dict("unet", config), out=folder / f"{precision}-{seed}")
    records = read(run / "metrics.jsonl")
    last = [r for r in records if r["kind"] == "val"][-1]
    skipped = max((r["skipped"] for r in records if r["kind"] == "train"), default=0)
    memory = max(r["memory_bytes"] for r in records if r["kind"] == "train")
    return {"iou": last["iou"], "dice": last["dice"], "loss": last["loss"], "skipped": skipped,
            "seconds": time.perf_counter() - start, "peak_memory_gb": memory / 1e9}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--precisions", default="fp32,bf16,fp16")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--size", type=int, default=512)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--simulate", action="store_true")
    parser.add_argument("--name", default="unet_parity")
    parser.add_argument("--out")
    arguments = parser.parse_args()
    names = arguments.precisions.split(",")
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(arguments.seeds):
            for name in names:
                runs[name].append(one_run(arguments, name, seed, Path(folder)))
                print(name, seed, json.dumps(runs[name][-1]), flush=True)
    ious = {name: [run["iou"] for run in found] for name, found in runs.items()}
    verdicts = {name: equivalence(ious[names[0]], ious[name]) for name in names[1:]}
    for name in names:
        print(
            f"{name}: IoU {statistics.mean(ious[name]):.4f} +- {statistics.stdev(ious[name]):.4f}",
            verdicts.get(name, ""),
        )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    results = {"settings": vars(arguments) | {"data": Path(arguments.data).name}, "runs": runs, "verdicts": verdicts}
    store(arguments.name, results, device, arguments.out)


if __name__ == "__main__":
    main()
