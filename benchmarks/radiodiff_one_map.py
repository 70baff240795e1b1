"""RadioDiff's numerics on one real map: bf16 must lose no step, fp16 says what the guard saw.

    python benchmarks/radiodiff_one_map.py FOLDER [--steps 300] [--precisions bf16,fp16] [--small] [--work DIR]

FOLDER holds one map of RadioMapSeer as building/*.png, antenna/*.png and gain/*.png. It is copied into RadioMapSeer's
layout as two maps with the same buildings: up to eight transmitters in a training map, two in a validation map. The
buildings are the same in both, so scores mean nothing; losses, skipped steps and scales do. Both stages train at their
published size (stage 1 without discriminator).
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch

from halfstep.errors import TrainingStopped
from halfstep_train.data.files import make_natural_key
from halfstep_train.report.metrics_file import read
from halfstep_train.run.train import train
from halfstep_train.workloads import load
from halfstep_train.workloads.radio.maps import get_public_split
from recording import store

NUM_TRAIN, NUM_VAL = 8, 2
SMALL_STAGE = ("data.image_size=32", "model.first_stage.width=8", "model.first_stage.num_blocks=1")
SMALL_UNET = (
    "model.width=8", "model.multipliers=[1, 2]", "model.windows=[[2, 2], [1, 1]]",
    "model.feature_windows=[[2, 2], [1, 1]]", "model.pyramid.width=8", "model.pyramid.depths=[1, 1]",
    "model.pyramid.num_heads=[1, 2]", "model.pyramid.window=4", "precision.simulate=true",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--precisions", default="bf16,fp16")
    parser.add_argument("--small", action="store_true", help="tiny networks in simulated formats, for a CPU")
    parser.add_argument("--work", type=Path, help="folder for the tree and the runs; default: temporary files")
    parser.add_argument("--out", help="folder for the JSON, default benchmarks/results")
    arguments = parser.parse_args()
    work = arguments.work or Path(tempfile.mkdtemp())
    tree = work / "RadioMapSeer"
    write_tree(arguments.folder, tree)
    found: dict[str, Any] = {}
    for precision in arguments.precisions.split(","):
        found[precision] = both_stages(work / precision, tree, precision, arguments)
        print(precision, found[precision], flush=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    store("radiodiff_one_map", {"steps": arguments.steps, "small": arguments.small, **found}, device, arguments.out)
    if "bf16" in found:
        assert all(stage["skipped"] == 0 for stage in found["bf16"].values()), "bf16 lost a step"


def write_tree(folder: Path, tree: Path) -> None:
    """One map as two; gains of DPM, whatever simulation they are of."""
    split = get_public_split("radiounet", "DPM")
    buildings = next((folder / "building").glob("*.png"))
    names = sorted((path.name for path in (folder / "gain").glob("*.png")), key=make_natural_key)
    names = [name for name in names if (folder / "antenna" / name).is_file()][: NUM_TRAIN + NUM_VAL]
    parts = {split["train"][0]: names[:-NUM_VAL], split["val"][0]: names[-NUM_VAL:]}
    for sub in ("png/buildings_complete", "png/antennas", "gain/DPM"):
        (tree / sub).mkdir(parents=True, exist_ok=True)
    for number, chosen in parts.items():
        shutil.copy(buildings, tree / "png/buildings_complete" / f"{number}.png")
        for place, name in enumerate(chosen):
            shutil.copy(folder / "antenna" / name, tree / "png/antennas" / f"{number}_{place}.png")
            shutil.copy(folder / "gain" / name, tree / "gain/DPM" / f"{number}_{place}.png")


def both_stages(work: Path, tree: Path, precision: str, arguments: argparse.Namespace) -> dict[str, Any]:
    shared = (
        f"data.dir={tree}", f"precision={precision}", f"train.max_steps={arguments.steps}", "train.epochs=1000000",
        "train.report_every=1", f"train.validate_every_steps={arguments.steps}", "train.batch_size=4",
        "data.num_workers=0", f"train.checkpoint_every={arguments.steps}", *(SMALL_STAGE if arguments.small else ()),
    )  # fmt: skip
    first = ("model.discriminator.enabled=false", "optimizer.lr=1e-4", *(SMALL_UNET[-1:] if arguments.small else ()))
    found = {"stage 1": one_run("radiodiff_vae", (*shared, *first), work / "vae")}
    if (work / "vae" / "model").is_dir():
        second = (f"model.vae={work / 'vae'}", *(SMALL_UNET if arguments.small else ()))
        found["stage 2"] = one_run("radiodiff", (*shared, *second), work / "diffusion")
    return found


def one_run(workload: str, words: tuple[str, ...], out: Path) -> dict[str, Any]:
    stopped = ""
    try:
        train(load(workload, overrides=words), out=out)
    except TrainingStopped as error:
        stopped = str(error)
    rows = read(out / "metrics.jsonl")
    steps = [row for row in rows if row["kind"] == "train"]
    few = max(1, len(steps) // 10)
    return {
        "first_loss": sum(row["loss"] for row in steps[:few]) / few,
        "last_loss": sum(row["loss"] for row in steps[-few:]) / few,
        "steps": len(steps),
        "skipped": steps[-1]["skipped"],
        "scale": steps[-1]["scale"],
        "reasons": sorted({row["reason"] for row in rows if row["kind"] == "event" and "reason" in row}),
        **({"stopped": stopped} if stopped else {}),
    }


if __name__ == "__main__":
    main()
