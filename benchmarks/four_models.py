"""Four models in four precisions: what mixed precision gains over strict fp32 and over TF32, by halfstep's own step.

    python benchmarks/four_models.py [--models resnet50,vit_l,sd_unet,gpt2_xl] [--precisions fp32,tf32,fp16,bf16]
                                     [--prepare 4] [--out DIR]

Every row is a captured step in a process of its own. `--prepare N` first runs all rows once, N side by side, for the
compiler's cache alone, and then times them one after the other. `--small` is for trying the script on a CPU.
"""

from __future__ import annotations

import argparse
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch

from halfstep.bench.settings import bench_config
from halfstep.config.schema import RunConfig
from recording import store
from step_rows import halfstep_row, row_in_a_process

PRECISIONS = ("fp32", "tf32", "fp16", "bf16")


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """One line of the table."""

    title: str
    workload: str
    batch_size: int
    words: tuple[str, ...] = ()
    small: tuple[str, ...] = ()


MODELS = {
    "resnet50": Model(title="ResNet-50, 224, 64", workload="resnet50", batch_size=64, small=("data.image_size=32",)),
    "vit_l": Model(
        title="ViT-L/16, 224, 64", workload="vit_l_16", batch_size=64, small=("data.image_size=32", "model.depth=1")
    ),
    "sd_unet": Model(
        title="SD 1.x U-Net 860M, 4×64×64, 8",
        workload="diffusion_speed:SD_UNET",
        batch_size=8,
        words=("model.channels=[320, 640, 1280, 1280]", "model.attention=[0, 1, 2]", "noise.schedule=scaled_linear"),
        small=("model.channels=[32, 64]", "model.attention=[0]"),
    ),
    "gpt2_xl": Model(
        title="GPT-2 XL 1.56B, 4×1024",
        workload="gpt2_xl",
        batch_size=4,
        small=("model.depth=1", "model.dim=64", "model.heads=2", "model.context=64"),
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--precisions", default=",".join(PRECISIONS))
    parser.add_argument("--prepare", type=int, default=0, metavar="N", help="compile all rows first, N side by side")
    parser.add_argument("--small", action="store_true", help="tiny models, for trying this on a CPU")
    parser.add_argument("--out", help="folder for the JSON, default benchmarks/results")
    parser.add_argument("--row", nargs=2, metavar=("MODEL", "PRECISION"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.row:
        name, precision = arguments.row
        print(json.dumps(halfstep_row(config_of(MODELS[name], arguments.small), precision, warm_up=8)))
        return
    if unknown := set(arguments.models.split(",")) - set(MODELS):
        parser.error(f"there are {', '.join(MODELS)}, not {', '.join(sorted(unknown))}")
    all_rows(arguments)


def config_of(model: Model, small: bool) -> RunConfig:
    words = (*model.words, *model.small) if small else model.words
    return bench_config(model.workload, words, {"batch_size": 2 if small else model.batch_size}, small=False)


def all_rows(arguments: argparse.Namespace) -> None:
    asked = list(product(arguments.models.split(","), arguments.precisions.split(",")))
    suffix = ["--small"] if arguments.small else []
    if arguments.prepare:
        with ThreadPoolExecutor(arguments.prepare) as threads:
            list(threads.map(lambda row: row_in_a_process(__file__, ["--row", *row, *suffix]), asked))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found = dict[str, dict[str, Any]]()
    for name, precision in asked:
        row = row_in_a_process(__file__, ["--row", name, precision, *suffix])
        found.setdefault(name, {"title": MODELS[name].title, "rows": {}})["rows"][precision] = row
        print(name, precision, json.dumps(row), flush=True)
        store("four_models", {"models": found}, device, arguments.out)
    print(table(found))


def table(found: dict[str, dict[str, Any]]) -> str:
    """In Markdown: ms of a step, and how many times as fast as strict fp32 and as TF32."""
    lines = ["| model | " + " | ".join(PRECISIONS) + " |", "|---" * (len(PRECISIONS) + 1) + "|"]
    for model in found.values():
        lines.append(f"| {model['title']} | " + " | ".join(cell(model["rows"], p) for p in PRECISIONS) + " |")
    return "\n".join(lines)


def cell(rows: dict[str, Any], precision: str) -> str:
    ms = rows.get(precision, {}).get("ms")
    if ms is None:
        return "–"
    gains = [f"{rows[base]['ms'] / ms:.1f}×" for base in ("fp32", "tf32") if "ms" in rows.get(base, {})]
    return f"{ms:.1f} ms ({' / '.join(gains)})" if gains else f"{ms:.1f} ms"


if __name__ == "__main__":
    main()
