"""Your own model in your own loop: time hs.Step against the loops that people write.

    python benchmarks/own_loop.py [--only mlp,gpt2] [--variants "plain,hs auto"] [--rounds 7] [--out DIR]
    python benchmarks/own_loop.py --zoo [--jobs 14]   # tier B of zoo.py, which stores own_loop_zoo.json

Each model trains in bf16 with AdamW (fused) and clipping at 1.0; every step copies its batch from pinned memory.

    plain              autocast, backward, clip_grad_norm_, optimizer.step()
    compiled           the same with torch.compile of the loss function, model included
    reduce-overhead    the same with mode="reduce-overhead"
    hs eager           hs.Step(..., fast="off")
    hs graph           hs.Step(..., fast="graph"): the whole step captured, with torch's kernels
    hs auto            hs.Step(..., fast=hs.Fast("auto", num_steps=100_000))
    hs tuned           the same for 10,000,000 steps, which tunes the compiled step; only if asked for, like
    max-autotune       the second row with mode="max-autotune"

One process per model. They build and compile side by side; then one after the other has the device, and its variants
take turns, window by window. `ms` is the median over the rounds, with the smallest and largest. `gb` is the memory that
a variant reserved for model, optimizer and graphs, `peak_gb` the most it reserved while it compiled and chose.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map_only

import halfstep as hs
from recording import store
from zoo import TIER_B

DEVICE = torch.device("cuda")
WINDOW_S, WARMUP_STEPS, NUM_BATCHES = 0.25, 12, 12
MOST_WARMUP_S = 240.0
Batch = Any
Built = tuple[nn.Module, Callable[[Batch], Tensor], Callable[[int], Batch]]
"""A model, a loss function of one batch, and a function that makes the batch of a step on the CPU."""
Train = Callable[[Batch], None]


# --- models ---


class Block(nn.Module):
    """The basic block of a residual network for CIFAR."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(after), nn.BatchNorm2d(after)])
        self.short: nn.Module = nn.Identity()
        if stride != 1 or before != after:
            self.short = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norms[1](self.second(F.relu(self.norms[0](self.first(x)))))
        return F.relu(y + self.short(x))


def make_resnet18() -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    before = 64
    for after, stride in ((64, 1), (64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), (512, 1)):
        layers.append(Block(before, after, stride))
        before = after
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(1000, 256)
        layer = nn.TransformerEncoderLayer(256, 8, 1024, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
        self.head = nn.Linear(256, 1000)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.layers(self.embed(tokens)))
        return logits


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(1000, 256)
        self.cells = nn.LSTM(256, 256, 2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(512, 20)

    def forward(self, tokens: Tensor) -> Tensor:
        tags: Tensor = self.head(self.cells(self.embed(tokens))[0])
        return tags


def classify(model: nn.Module, make_batch: Callable[[int], Batch]) -> Built:
    return model, lambda batch: F.cross_entropy(model(batch[0]), batch[1]), make_batch


def label_tokens(model: nn.Module, make_batch: Callable[[int], Batch]) -> Built:
    return model, lambda batch: F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten()), make_batch


def make_language(kind: str, num: int, length: int, **sizes: int) -> Built:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(kind, **sizes)
    model = AutoModelForCausalLM.from_config(config)
    make_ids = lambda _: torch.randint(0, config.vocab_size, (num, length))  # noqa: E731
    return model, lambda ids: model(input_ids=ids, labels=ids).loss, make_ids


def make_vision(name: str, num: int) -> Built:
    import torchvision

    return classify(getattr(torchvision.models, name)(), images(num, 224, 1000))


def make_mlp() -> Built:
    model = nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    return classify(model, lambda _: (torch.randn(128, 784), torch.randint(0, 10, (128,))))


def images(num: int, size: int, num_classes: int) -> Callable[[int], Batch]:
    return lambda _: (torch.randn(num, 3, size, size), torch.randint(0, num_classes, (num,)))


def tokens(num: int, *lengths: int, num_labels: int = 1000) -> Callable[[int], Batch]:
    def make(number: int) -> Batch:
        shape = (num, lengths[number % len(lengths)])
        return torch.randint(0, 1000, shape), torch.randint(0, num_labels, shape)

    return make


def find_case(name: str) -> Callable[[], Built]:
    if name in CASES:
        return CASES[name]
    from zoo_models import MODELS

    return MODELS[name].build


CASES: dict[str, Callable[[], Built]] = {
    "mlp": make_mlp,
    "resnet18": lambda: classify(make_resnet18(), images(128, 32, 10)),
    "encoder": lambda: label_tokens(Encoder(), tokens(32, 128)),
    "lengths": lambda: label_tokens(Encoder(), tokens(32, *range(32, 128, 8))),
    "tagger": lambda: label_tokens(Tagger(), tokens(64, 64, num_labels=20)),
    "gpt2": lambda: make_language("gpt2", 8, 1024),
    "convnext_tiny": lambda: make_vision("convnext_tiny", 128),
    "vit_b_16": lambda: make_vision("vit_b_16", 64),
}


# --- loops ---


def make_plain(case: Callable[[], Built], mode: str | None) -> tuple[Train, Callable[[], str]]:
    model, optimizer, loss_fn = build(case)
    run: Any = loss_fn if mode is None else torch.compile(loss_fn, mode=mode)

    def train(batch: Batch) -> None:
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            loss = run(batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return train, lambda: mode or "eager"


def make_guarded(case: Callable[[], Built], fast: Any, num_steps: int = 100_000) -> tuple[Train, Callable[[], str]]:
    model, optimizer, loss_fn = build(case)
    step = hs.Step(model, optimizer, "bf16", fast=hs.Fast(fast, num_steps=num_steps), clip_norm=1.0)
    return (
        lambda batch: step(loss_fn, [batch]) and None,
        lambda: f"{step.mode} | {step._fast.reason or step.certificate}",
    )


def build(
    case: Callable[[], Built], seed: int = 0
) -> tuple[nn.Module, torch.optim.Optimizer, Callable[[Batch], Tensor]]:
    torch.manual_seed(seed)
    model, loss_fn, make_batch = case()
    make_batch(0)  # in the zoo it sets what a loop changes between two steps; here that stays as it is
    model.to(DEVICE).train()
    for key, value in list(model.__dict__.get("kept", {}).items()):
        model.kept[key] = tree_map_only(Tensor, lambda tensor: tensor.to(DEVICE), value)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return model, torch.optim.AdamW(trained, 1e-4, fused=True), loss_fn


VARIANTS: dict[str, Callable[[Callable[[], Built]], tuple[Train, Callable[[], str]]]] = {
    "plain": lambda case: make_plain(case, None),
    "compiled": lambda case: make_plain(case, "default"),
    "reduce-overhead": lambda case: make_plain(case, "reduce-overhead"),
    "hs eager": lambda case: make_guarded(case, "off"),
    "hs graph": lambda case: make_guarded(case, "graph"),
    "hs auto": lambda case: make_guarded(case, "auto"),
    "hs tuned": lambda case: make_guarded(case, "auto", num_steps=10_000_000),
    "max-autotune": lambda case: make_plain(case, "max-autotune"),
}

AWAITED = {"hs auto": "compile", "hs tuned": "tuned"}  # in the mode, once hs.Step has seen enough steps


ZOO_VARIANTS = ("plain", "compiled", "reduce-overhead", "hs auto")


# --- the process of one model ---


def train_model(name: str, variants: list[str], rounds: int) -> None:
    case = find_case(name)
    torch.manual_seed(1)
    make_batch = case()[2]
    host = [tree_map_only(Tensor, Tensor.pin_memory, make_batch(number)) for number in range(NUM_BATCHES)]
    found: dict[str, dict[str, Any]] = {}
    trains: dict[str, Train] = {}

    def run(train: Train, number: int) -> None:
        batch = host[number % NUM_BATCHES]
        train(tree_map_only(Tensor, lambda tensor: tensor.to(DEVICE, non_blocking=True), batch))

    describes: dict[str, Callable[[], str]] = {}
    for variant in variants:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before, began = torch.cuda.memory_reserved(), time.perf_counter()
        try:
            train, describe = VARIANTS[variant](case)
            number = 0
            while number < WARMUP_STEPS or AWAITED.get(variant, "") not in describe():
                run(train, number)
                number += 1
                if number > 400 or time.perf_counter() - began > MOST_WARMUP_S:
                    break
            for number in range(WARMUP_STEPS):
                run(train, number)
            torch.cuda.synchronize()
        except Exception as error:  # a variant that fails is reported, and the others go on
            found[variant] = {"problem": f"{type(error).__name__}: {str(error).strip().splitlines()[0][:300]}"}
            continue
        torch.cuda.empty_cache()
        sizes_gb = [(size - before) / 1e9 for size in (torch.cuda.memory_reserved(), torch.cuda.max_memory_reserved())]
        trains[variant], describes[variant] = train, describe
        seconds = time.perf_counter() - began
        found[variant] = {"gb": sizes_gb[0], "peak_gb": sizes_gb[1], "warmup_s": seconds}
    print("ready", flush=True)
    sys.stdin.readline()
    times: dict[str, list[float]] = {variant: [] for variant in trains}
    sizes: dict[str, int] = {}
    for round_number in range(rounds + 1):
        for variant, train in trains.items():
            num = sizes.get(variant, 20)
            torch.cuda.synchronize()
            began = time.perf_counter()
            for number in range(num):
                run(train, number)
            torch.cuda.synchronize()
            seconds = (time.perf_counter() - began) / num
            sizes[variant] = max(5, round(WINDOW_S / seconds))
            if round_number:  # the first round sets the length of the windows
                times[variant].append(seconds * 1e3)
    for variant, ms in times.items():
        spread = {"ms": statistics.median(ms), "ms_min": min(ms), "ms_max": max(ms)}
        found[variant] |= {**spread, "mode": describes[variant]()}
    print(json.dumps(found), flush=True)


# --- the process that starts the others ---


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="models, with commas; those of zoo.py have names such as hf_gpt2")
    parser.add_argument("--zoo", action="store_true", help="time tier B of zoo.py: plain and compiled loops, hs auto")
    parser.add_argument("--variants", help="loops, with commas")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--jobs", type=int, default=14, help="models that compile side by side")
    parser.add_argument("--out", help="folder for the JSON, default benchmarks/results")
    parser.add_argument("--train", metavar="MODEL", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    variants = (arguments.variants or ",".join(ZOO_VARIANTS if arguments.zoo else list(VARIANTS)[:-2])).split(",")
    if arguments.train:
        train_model(arguments.train, variants, arguments.rounds)
        return
    names = arguments.only.split(",") if arguments.only else TIER_B if arguments.zoo else list(CASES)
    found: dict[str, Any] = {}
    for first in range(0, len(names), arguments.jobs):
        time_models(names[first : first + arguments.jobs], variants, arguments, found)


def time_models(names: list[str], variants: list[str], arguments: argparse.Namespace, found: dict[str, Any]) -> None:
    """Let models compile side by side, and time one after the other."""
    options = ["--variants", ",".join(variants), "--rounds", str(arguments.rounds)]
    processes = {
        name: subprocess.Popen(
            [sys.executable, __file__, "--train", name, *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for name in names
    }
    for process in processes.values():
        assert process.stdout is not None
        next((line for line in process.stdout if line.strip() == "ready"), None)
    for name, process in processes.items():
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write("go\n")
            process.stdin.flush()
            lines = [line for line in process.stdout if line.startswith("{")]
            found[name] = json.loads(lines[-1])
        except (OSError, IndexError) as error:
            found[name] = {"problem": f"the process ended: {error}"}
        process.wait()
        show(name, found[name])
        store(
            "own_loop_zoo" if arguments.zoo else "own_loop",
            {"rounds": arguments.rounds, "models": found},
            DEVICE,
            arguments.out,
        )


def show(name: str, found: dict[str, Any]) -> None:
    for variant, one in found.items():
        if isinstance(one, dict) and "ms" in one:
            sizes = f"{one['gb']:6.2f} GB, at most {one['peak_gb']:.2f}"
            print(f"{name:20s}{variant:16s}{one['ms']:9.3f} ms {sizes}  {one['mode']}", flush=True)
        else:
            print(f"{name:20s}{variant:16s} {one}", flush=True)


if __name__ == "__main__":
    main()
