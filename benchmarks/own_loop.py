"""Your own model in your own loop: time hs.Step against the loops that people write.

    python benchmarks/own_loop.py [--only mlp,gpt2] [--variants "plain,hs auto"] [--rounds 7] [--out DIR]

Each model trains in bf16 with AdamW (fused) and clipping at 1.0; every step copies its batch from pinned memory.

    plain              autocast, backward, clip_grad_norm_, optimizer.step()
    compiled           the same with torch.compile(model)
    reduce-overhead    the same with torch.compile(model, mode="reduce-overhead")
    hs eager           hs.Step(..., fast="off")
    hs graph           hs.Step(..., fast="graph"): the whole step captured, with torch's kernels
    hs cycled          the same with OneCycleLR, which cycles AdamW's betas: its fused kernel cannot be captured
    hs auto            hs.Step(..., fast=hs.Fast("auto", num_steps=100_000))

One process per model. All build and compile side by side; then one after the other has the device, and its variants
take turns, window by window. `ms` is the median over the rounds, with the smallest and largest. `first_captured_s` is
the time from the first call of a new step to its first replay, alone on the machine. `gb` is the memory that a variant
reserved for model, optimizer and graphs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import halfstep as hs
from recording import store

DEVICE = torch.device("cuda")
WINDOW_S, WARMUP_STEPS, NUM_BATCHES = 0.25, 12, 4
MOST_WARMUP_S = 240.0
Batch = tuple[Tensor, ...]
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


def make_gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    model: nn.Module = GPT2LMHeadModel(GPT2Config())
    return model


def make_vision(name: str) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import torchvision

        model: nn.Module = getattr(torchvision.models, name)()
        return model

    return make


def make_mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))


def classify(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def predict_tokens(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def predict_next(model: nn.Module, batch: Batch) -> Tensor:
    loss: Tensor = model(input_ids=batch[0], labels=batch[0]).loss
    return loss


def images(num: int, size: int, num_classes: int) -> Callable[[], Batch]:
    return lambda: (torch.randn(num, 3, size, size), torch.randint(0, num_classes, (num,)))


@dataclass(frozen=True)
class Case:
    make_model: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Batch], Tensor]
    make_batch: Callable[[], Batch]


CASES = {
    "mlp": Case(make_mlp, classify, lambda: (torch.randn(128, 784), torch.randint(0, 10, (128,)))),
    "resnet18": Case(make_resnet18, classify, images(128, 32, 10)),
    "encoder": Case(
        Encoder, predict_tokens, lambda: (torch.randint(0, 1000, (32, 128)), torch.randint(0, 1000, (32, 128)))
    ),
    "gpt2": Case(make_gpt2, predict_next, lambda: (torch.randint(0, 50257, (8, 1024)),)),
    "convnext_tiny": Case(make_vision("convnext_tiny"), classify, images(128, 224, 1000)),
    "vit_b_16": Case(make_vision("vit_b_16"), classify, images(64, 224, 1000)),
}


# --- loops ---


def make_plain(case: Case, mode: str | None) -> tuple[Train, Callable[[], str]]:
    torch.manual_seed(0)
    model = case.make_model().to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)
    run: Any = model if mode is None else torch.compile(model, mode=mode)

    def train(batch: Batch) -> None:
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            loss = case.loss(run, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return train, lambda: mode or "eager"


def make_guarded(case: Case, fast: Any, *, is_cycled: bool = False) -> tuple[Train, Callable[[], str]]:
    torch.manual_seed(0)
    model = case.make_model().to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-4, 100_000) if is_cycled else None
    captures = hs.Fast(fast, num_steps=100_000)
    step = hs.Step(model, optimizer, "bf16", fast=captures, clip_norm=1.0, schedule=schedule)

    def loss_fn(batch: Batch) -> Tensor:
        return case.loss(model, batch)

    return lambda batch: step(loss_fn, [batch]) and None, lambda: f"{step.mode} | {step.certificate}"


VARIANTS: dict[str, Callable[[Case], tuple[Train, Callable[[], str]]]] = {
    "plain": lambda case: make_plain(case, None),
    "compiled": lambda case: make_plain(case, "default"),
    "reduce-overhead": lambda case: make_plain(case, "reduce-overhead"),
    "hs eager": lambda case: make_guarded(case, "off"),
    "hs graph": lambda case: make_guarded(case, "graph"),
    "hs cycled": lambda case: make_guarded(case, "graph", is_cycled=True),
    "hs auto": lambda case: make_guarded(case, "auto"),
}


# --- the process of one model ---


def train_model(name: str, variants: list[str], rounds: int) -> None:
    case = CASES[name]
    torch.manual_seed(1)
    host = [tuple(tensor.pin_memory() for tensor in case.make_batch()) for _ in range(NUM_BATCHES)]
    found: dict[str, dict[str, Any]] = {}
    trains: dict[str, Train] = {}

    def run(train: Train, number: int) -> None:
        train(tuple(tensor.to(DEVICE, non_blocking=True) for tensor in host[number % NUM_BATCHES]))

    describes: dict[str, Callable[[], str]] = {}
    for variant in variants:
        torch.cuda.empty_cache()
        before, began = torch.cuda.memory_reserved(), time.perf_counter()
        try:
            train, describe = VARIANTS[variant](case)
            number = 0
            # "hs auto" compiles once it has seen enough steps.
            while number < WARMUP_STEPS or variant == "hs auto" and "compile" not in describe():
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
        gb = (torch.cuda.memory_reserved() - before) / 1e9
        trains[variant], describes[variant] = train, describe
        found[variant] = {"gb": gb, "warmup_s": time.perf_counter() - began}
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
    torch._dynamo.reset()
    began = time.perf_counter()
    train, describe = VARIANTS["hs graph"](case)
    for number in range(20):
        run(train, number)
        if describe().startswith("graph"):
            torch.cuda.synchronize()
            found.setdefault("hs graph", {})["first_captured_s"] = time.perf_counter() - began
            break
    print(json.dumps(found), flush=True)


# --- the process that starts the others ---


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(CASES), help="models, with commas")
    parser.add_argument("--variants", default=",".join(VARIANTS), help="loops, with commas")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", help="folder for the JSON, default benchmarks/results")
    parser.add_argument("--train", metavar="MODEL", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.train:
        train_model(arguments.train, arguments.variants.split(","), arguments.rounds)
        return
    names = arguments.only.split(",")
    processes = {name: start(name, arguments.variants, arguments.rounds) for name in names}
    found: dict[str, Any] = {}
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
        store("own_loop", {"rounds": arguments.rounds, "models": found}, DEVICE, arguments.out)


def start(name: str, variants: str, rounds: int) -> subprocess.Popen[str]:
    command = [sys.executable, __file__, "--train", name, "--variants", variants, "--rounds", str(rounds)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def show(name: str, found: dict[str, Any]) -> None:
    for variant, one in found.items():
        if isinstance(one, dict) and "ms" in one:
            captured = f", first captured {one['first_captured_s']:.1f} s" if "first_captured_s" in one else ""
            print(
                f"{name:14s}{variant:16s}{one['ms']:9.3f} ms {one['gb']:6.2f} GB{captured}  {one['mode']}", flush=True
            )
        else:
            print(f"{name:14s}{variant:16s} {one}", flush=True)


if __name__ == "__main__":
    main()
