"""The U-Net demo in fp32, simulated bf16 and simulated fp16 on the CPU: do they learn the same?

    python benchmarks/demo_parity.py

One seed each, so this shows that the numerics of a laptop's simulation train, not that accuracy is the same; for that
see unet_parity.py.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from halfstep_train.report.metrics_file import read
from halfstep_train.run.train import train
from halfstep_train.workloads import load
from recording import store


def one_run(precision: str, folder: Path) -> dict[str, Any]:
    overrides = [f"precision.simulate={str(precision != 'fp32').lower()}", "device=cpu", "log.quiet=true"]
    start = time.perf_counter()
    run = train(load("unet", flags={"precision": precision}, overrides=overrides), out=folder / precision)
    validations = [record for record in read(run / "metrics.jsonl") if record["kind"] == "val"]
    return {"best_iou": max(v["iou"] for v in validations), "seconds": time.perf_counter() - start}


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = {name: one_run(name, Path(folder)) for name in ("fp32", "bf16", "fp16")}
    for name, row in rows.items():
        row["points_from_fp32"] = 100 * (row["best_iou"] - rows["fp32"]["best_iou"])
        print(f"{name}: best IoU {row['best_iou']:.4f} ({row['points_from_fp32']:+.2f} points), {row['seconds']:.0f} s")
    store("demo_parity", {"rows": rows, "threads": torch.get_num_threads()}, torch.device("cpu"))


if __name__ == "__main__":
    main()
