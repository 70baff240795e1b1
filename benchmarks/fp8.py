"""Where fp8 pays in hs.Step: the captured, compiled step in bf16 against the same step with each of torchao's recipes.

    python benchmarks/fp8.py [--only llama_1b,gpt2_xl] [--recipes tensorwise] [--out DIR]
    python benchmarks/fp8.py --only llama_1b --recipes tensorwise --loss 500 FILE --seeds 3

Each model trains with AdamW (fused) and clipping at 1.0 until hs.Step has decided. Prints and stores what it tells: the
times of both steps, or why fp8 was not tried, and how many layers run in fp8 from then on. One to three minutes for
each model and recipe, mostly to compile. Needs torchao, transformers and torchvision.

`--loss` trains language models for so many steps on the bytes of a text, in bf16 and with fp8 forced on all layers that
fit, and stores the mean loss of the last 50 steps for each seed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

import halfstep as hs
from halfstep.precision.names import FP8_RECIPES
from own_loop import DEVICE, Built, build, make_language, make_vision
from recording import store

LLAMA = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_key_value_heads": 8}
FEW = {**LLAMA, "num_hidden_layers": 4, "vocab_size": 1024}  # blocks alone, which compile in a quarter of the time
WIDE = {**FEW, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 2}  # of Llama 8B
CASES: dict[str, Callable[[], Built]] = {
    "blocks_1b": lambda: make_language("llama", 4, 2048, **FEW),
    "blocks_8b": lambda: make_language("llama", 4, 2048, **WIDE),
    "llama_1b": lambda: make_language("llama", 4, 2048, **LLAMA),
    "gpt2": lambda: make_language("gpt2", 8, 1024),
    "gpt2_xl": lambda: make_language("gpt2", 4, 1024, n_embd=1600, n_layer=48, n_head=25),
    "vit_l_16": lambda: make_vision("vit_l_16", 64),
}
JUDGED_AFTER = 60  # steps: eager ones, the capture, and 20 replays in bf16


def judge_recipe(name: str, recipe: str) -> dict[str, Any]:
    """Train until hs.Step has timed the recipe, and return what it decided."""
    torch._dynamo.reset()
    model, optimizer, loss_fn = build(CASES[name])
    with torch.device("meta"):  # the model again, without its numbers
        make_batch = CASES[name]()[2]
    batch = tree_map_only(Tensor, lambda tensor: tensor.to(DEVICE), make_batch(0))
    step = hs.Step(model, optimizer, hs.Precision("fp8", fp8_recipe=recipe), fast="compile", clip_norm=1.0)
    for _ in range(JUDGED_AFTER):
        step(loss_fn, [batch])
    return {"layers": sum(row.compute == "fp8" for row in step.plan.rows), "reason": step.plan.reason}


def train_on_text(name: str, precision: hs.Precision, seed: int, arguments: argparse.Namespace) -> float:
    """Return the mean loss of the last 50 steps."""
    torch._dynamo.reset()
    model, optimizer, loss_fn = build(CASES[name], seed)
    with torch.device("meta"):
        num, length = CASES[name]()[2](0).shape
    ids = torch.frombuffer(bytearray(Path(arguments.loss[1]).read_bytes()), dtype=torch.uint8).to(DEVICE).long()
    step = hs.Step(model, optimizer, precision, fast="compile", clip_norm=1.0)
    outcomes = []
    for _ in range(int(arguments.loss[0])):
        starts = torch.randint(len(ids) - length, (num, 1), device=DEVICE)
        outcomes.append(step(loss_fn, [ids[starts + torch.arange(length, device=DEVICE)]]))
    return fmean(float(outcome.loss) for outcome in outcomes[-50:])


def compare_losses(name: str, recipe: str, arguments: argparse.Namespace) -> dict[str, list[float]]:
    asked = {"bf16": hs.Precision("bf16"), "fp8": hs.Precision("fp8", fp8_recipe=recipe, force=True)}
    return {of: [train_on_text(name, asked[of], seed, arguments) for seed in range(arguments.seeds)] for of in asked}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(CASES), help="models, with commas")
    parser.add_argument("--recipes", default=",".join(FP8_RECIPES), help="of torchao, with commas")
    parser.add_argument("--loss", nargs=2, metavar=("STEPS", "FILE"), help="compare losses on a text instead of times")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--out", help="folder for the JSON, default benchmarks/results")
    arguments = parser.parse_args()
    found: dict[str, dict[str, Any]] = {}
    for name in arguments.only.split(","):
        found[name] = {}
        for recipe in arguments.recipes.split(","):
            row = compare_losses(name, recipe, arguments) if arguments.loss else judge_recipe(name, recipe)
            print(f"{name:10s}{recipe:20s}{row}", flush=True)
            found[name][recipe] = row
            store("fp8_loss" if arguments.loss else "fp8", {"models": found}, DEVICE, arguments.out)


if __name__ == "__main__":
    main()
