"""Where fp8 pays: hs.Step in bf16 against torchao's recipes, captured and compiled, for layers, steps and the loss.

    python benchmarks/fp8.py --parts layers                          linear layers alone, at three sizes
    python benchmarks/fp8.py --parts steps --only llama_1b           whole steps, as hs.Step judges them
    python benchmarks/fp8.py --parts steps --only llama_1b --all     the same with all layers, not only those that gain
    python benchmarks/fp8.py --parts loss --only gpt2 --recipes tensorwise --steps 500

`steps` reads both times from the plan that hs.Step makes. `loss` trains with the same batches in bf16 and in fp8, which
is used there whether it is faster or not, on the sources of Python's standard library, one token per byte. A model
takes one to three minutes for each recipe, mostly to compile. Needs torchao, and transformers or torchvision.
"""

from __future__ import annotations

import argparse
import functools
import os
import re
import statistics
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import halfstep as hs
from halfstep.fast import fp8_trial
from halfstep.hardware.fp8_layers import LayerShape, measure_fp8_gain
from halfstep.precision import fp8
from halfstep.precision.names import FP8_RECIPES
from own_loop import DEVICE, Case, classify, images, make_vision, predict_next
from recording import store

LAYERS = [LayerShape(width, 4 * width, 8192) for width in (1024, 2048, 4096)]
JUDGED_AFTER = 40  # steps: eager ones, the capture, and 20 replays in bf16


def make_gpt2(**sizes: int) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    model: nn.Module = GPT2LMHeadModel(GPT2Config(**sizes))
    return model


def make_llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32}
    model: nn.Module = LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=8, vocab_size=32000))
    return model


@functools.cache
def read_text() -> Tensor:
    folder = Path(os.__file__).parent
    text = b"".join(path.read_bytes() for path in sorted((*folder.glob("*.py"), *folder.glob("[a-r]*/*.py"))))
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def make_text(num: int, length: int) -> tuple[Tensor]:
    """Return windows at random positions of the standard library's sources."""
    data = read_text()
    return (torch.stack([data[at : at + length] for at in torch.randint(len(data) - length, (num,))]).long(),)


CASES = {
    "gpt2": Case(make_gpt2, predict_next, lambda: make_text(8, 1024)),
    "gpt2_xl": Case(lambda: make_gpt2(n_embd=1600, n_layer=48, n_head=25), predict_next, lambda: make_text(4, 1024)),
    "llama_1b": Case(make_llama, predict_next, lambda: make_text(4, 2048)),
    "vit_l_16": Case(make_vision("vit_l_16"), classify, images(64, 224, 1000)),
}


def train(case: Case, precision: Any, num_steps: int) -> tuple[hs.Step, list[float]]:
    """Train, and return the losses."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = case.make_model().to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-4, fused=True)
    step = hs.Step(model, optimizer, precision, fast="compile", clip_norm=1.0)
    outcomes = []
    for _ in range(num_steps):
        batch = tuple(tensor.to(DEVICE) for tensor in case.make_batch())
        outcomes.append(step(lambda batch: case.loss(model, batch), [batch]))
    return step, [outcome.loss for outcome in outcomes]


def time_steps(case: Case, recipe: str) -> dict[str, Any]:
    step, _ = train(case, hs.Precision("fp8", fp8_recipe=recipe), JUDGED_AFTER)
    told = f"{step.plan.reason}; {'; '.join(step.plan.warnings)}"
    times = re.search(r"takes ([\d.]+) ms in fp8 and ([\d.]+) ms in bf16", told)
    layers = sum(row.compute == "fp8" for row in step.plan.rows)
    fp8_ms, bf16_ms = map(float, times.groups()) if times else (None, None)
    return {"fp8_ms": fp8_ms, "bf16_ms": bf16_ms, "layers": layers, "told": told, "mode": step.mode}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="layers,steps,loss")
    parser.add_argument("--only", default=",".join(CASES), help="models, with commas")
    parser.add_argument("--recipes", default=",".join(FP8_RECIPES), help="with commas")
    parser.add_argument("--all", action="store_true", help="fp8 in all layers but the first and the last")
    parser.add_argument("--steps", type=int, default=500, help="steps of the loss")
    parser.add_argument("--out", help="folder for the JSON, default benchmarks/results")
    arguments = parser.parse_args()
    parts, recipes = arguments.parts.split(","), arguments.recipes.split(",")
    found: dict[str, Any] = {}

    def note(part: str, name: str, recipe: str, result: Any) -> None:
        found.setdefault(part, {}).setdefault(name, {})[recipe] = result
        print(f"{part:8s}{name:20s}{recipe:20s}{result}", flush=True)
        store(f"fp8_{'_'.join(parts)}", found, DEVICE, arguments.out)

    if arguments.all or "loss" in parts:
        fp8.MIN_GAIN = 0.0
    for shape in LAYERS if "layers" in parts else ():
        for recipe in recipes:
            note("layers", str(shape), recipe, asdict(measure_fp8_gain(*shape, "cuda:0", recipe)))
    for name in arguments.only.split(",") if "steps" in parts else ():
        for recipe in recipes:
            note("steps", name, recipe, time_steps(CASES[name], recipe))
    if "loss" in parts:
        fp8_trial.judge_whole_steps = lambda plan, **times: plan
        for name in arguments.only.split(","):
            for recipe in ("bf16", *recipes):
                asked = "bf16" if recipe == "bf16" else hs.Precision("fp8", fp8_recipe=recipe)
                step, losses = train(CASES[name], asked, arguments.steps)
                curve = [statistics.fmean(losses[k : k + 50]) for k in range(0, len(losses), 50)]
                note("loss", name, recipe, {"granted": step.plan.granted, "means of 50 steps": curve})


if __name__ == "__main__":
    main()
