"""Four models in four precisions: what mixed precision gains over strict fp32 and over TF32, by halfstep's own step.

    python benchmarks/four_models.py [--cells resnet50:fp32,gpt2_xl:bf16,...] [--at-once --seconds 200] [--out DIR]

Every cell is a captured step in a process of its own. Cells that are not asked for stay as they are stored, so that a
table can be filled in several calls; each has its command. What compiles at once must fit into memory at once:
`halfstep plan` says how much that is. `--small` is for trying the script on a CPU.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from halfstep_train.bench.problem import load_bench_config
from halfstep_train.config.schema import RunConfig
from recording import RESULTS, command, store
from step_rows import halfstep_row, rows, rows_parser

PRECISIONS = ("fp32", "tf32", "fp16", "bf16")


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """One line of the table."""

    title: str
    guide: str
    """What guide 2 says of fp16 and bf16 against fp32."""
    workload: str
    batch_size: int
    words: tuple[str, ...] = ()
    small: tuple[str, ...] = ()


MODELS = {
    "resnet50": Model(
        title="ResNet-50, 224, 64",
        guide="1.8× / 1.7×",
        workload="resnet50",
        batch_size=64,
        small=("data.image_size=32",),
    ),
    "vit_l": Model(
        title="ViT-L/16, 224, 64",
        guide="2.1× / 2.0×",
        workload="vit_l_16",
        batch_size=64,
        small=("data.image_size=32", "model.depth=1"),
    ),
    "sd_unet": Model(
        title="SD 1.x U-Net 860M, 4×64×64, 8",
        guide="1.9× / 1.85×",
        workload="diffusion_speed:SD_UNET",
        batch_size=8,
        words=("model.channels=[320, 640, 1280, 1280]", "model.attention=[0, 1, 2]", "noise.schedule=scaled_linear"),
        small=("model.channels=[32, 64]", "model.attention=[0]"),
    ),
    "gpt2_xl": Model(
        title="GPT-2 XL 1.56B, 4×1024",
        guide="1.7× / 1.65×",
        workload="gpt2_xl",
        batch_size=4,
        small=("model.depth=1", "model.dim=64", "model.heads=2", "model.context=64"),
    ),
}


def main() -> None:
    parser = rows_parser(__doc__, (), "MODEL", "PRECISION")
    every = [f"{name}:{precision}" for name in MODELS for precision in PRECISIONS]
    parser.add_argument("--cells", default=",".join(every))
    arguments = parser.parse_args()
    if arguments.row:
        name, precision = arguments.row
        config = config_of(MODELS[name], arguments.small)
        window = 5 if precision == "fp32" else 15  # whose steps take half a second
        print(json.dumps(halfstep_row(config, precision, warm_up=8, window=window, profiles=arguments.profile)))
        return
    if unknown := set(arguments.cells.split(",")) - set(every):
        parser.error(f"there are {', '.join(every)}, not {', '.join(sorted(unknown))}")
    fill(arguments)


def config_of(model: Model, small: bool) -> RunConfig:
    words = dict(word.split("=", 1) for word in (*model.words, *(model.small if small else ())))
    settings = tuple(f"{key}={value}" for key, value in words.items())
    return load_bench_config(model.workload, settings, {"batch_size": 2 if small else model.batch_size}, small=False)


def fill(arguments: argparse.Namespace) -> None:
    """The asked cells, stored beside those that are there already."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kept = Path(arguments.out or RESULTS) / "four_models.json"
    found: dict[str, dict[str, Any]] = json.loads(kept.read_text())["models"] if kept.exists() else {}
    suffix = ["--small"] * arguments.small + ["--profile"] * arguments.profile
    jobs = [["--row", *cell.split(":"), *suffix] for cell in arguments.cells.split(",")]
    for (_, name, precision, *_), row in rows(__file__, jobs, at_once=arguments.at_once, seconds=arguments.seconds):
        print(name, precision, json.dumps({key: value for key, value in row.items() if key != "profile"}), flush=True)
        if "problem" not in row:
            model = found.setdefault(name, {"title": MODELS[name].title, "rows": {}})
            model["rows"][precision] = {"command": command(), **row}
            store("four_models", {"models": found}, device, arguments.out)
    print(table(found))


def table(found: dict[str, dict[str, Any]]) -> str:
    """In Markdown: ms of a step, and how many times as fast as strict fp32 and as TF32."""
    lines = [f"| model | {' | '.join(PRECISIONS)} | the guide: fp16 / bf16 |", "|---" * (len(PRECISIONS) + 2) + "|"]
    for name, model in MODELS.items():
        if name in found:
            cells = " | ".join(cell(found[name]["rows"], precision) for precision in PRECISIONS)
            lines.append(f"| {model.title} | {cells} | {model.guide} |")
    return "\n".join(lines)


def cell(rows: dict[str, Any], precision: str) -> str:
    ms = rows.get(precision, {}).get("ms")
    if ms is None:
        return "–"
    gains = [f"{rows[base]['ms'] / ms:.1f}×" for base in ("fp32", "tf32") if "ms" in rows.get(base, {})]
    return f"{ms:.1f} ms ({' / '.join(gains)})" if gains else f"{ms:.1f} ms"


if __name__ == "__main__":
    main()
