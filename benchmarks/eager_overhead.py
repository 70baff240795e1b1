"""What hs.Step adds to an eager training step of a small model, where the host is the limit.

    python benchmarks/eager_overhead.py [--device cuda] [--out DIR] [--rounds 40] [--steps 25]

The plain loop has zero_grad, forward under autocast, backward, clip_grad_norm_ and step of a fused AdamW; hs.Step does
the same with its guard. Models: an MLP 784-512-512-10 and a ResNet-18 for CIFAR, batch 128, in bf16. On a CPU fp32, and
a ResNet of 4 channels on 2 images of 8x8 pixels, so that the host's work counts. Rounds of both loops take turns, and
each pair gives one ratio. Stored are the median and quartiles of the ratios, milliseconds per step, and the operations
that each loop dispatches in one step.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import halfstep as hs
from recording import finish_device_work, store

GOAL = 1.15
WARM_UP = 20

Loop = Callable[[], object]
Made = tuple[nn.Module, Tensor, Tensor]  # a model, its inputs and their classes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", help="folder for the JSON, default benchmarks/results")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--steps", type=int, default=25, help="steps in a round")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    found: dict[str, Any] = {}
    for name, make in (("mlp", make_mlp), ("resnet18", make_resnet)):
        loops = {"plain": plain_loop(make(device)), "hs.Step": guarded_loop(make(device))}
        found[name] = compare(loops, arguments.rounds, arguments.steps)
        print(name, found[name], flush=True)
    store(f"eager_overhead_{device.type}", {"goal": GOAL, "threads": torch.get_num_threads(), **found}, device,
          arguments.out)  # fmt: skip


def compare(loops: dict[str, Loop], rounds: int, steps: int) -> dict[str, Any]:
    for step in loops.values():
        for _ in range(WARM_UP):
            step()
    operations = {name: sum(count_operations(step).values()) for name, step in loops.items()}
    ms: dict[str, list[float]] = {name: [] for name in loops}
    for _ in range(rounds):
        for name, step in loops.items():
            finish_device_work()
            start = time.perf_counter()
            for _ in range(steps):
                step()
            finish_device_work()
            ms[name].append((time.perf_counter() - start) / steps * 1e3)
    ratios = [ours / plain for plain, ours in zip(ms["plain"], ms["hs.Step"], strict=True)]
    low, median, high = statistics.quantiles(ratios, n=4)
    return {
        "ratio": {"median": median, "quartiles": [low, high]},
        "ms": {name: {"median": statistics.median(own), "min": min(own)} for name, own in ms.items()},
        "operations": operations,
    }


# --- the two loops ---


def plain_loop(made: Made) -> Loop:
    model, x, y = made
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)
    is_half = x.is_cuda

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(x.device.type, torch.bfloat16, enabled=is_half):
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def guarded_loop(made: Made) -> Loop:
    model, x, y = made
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        guarded = hs.Step(model, optimizer, "bf16" if x.is_cuda else "fp32", clip_norm=1.0, fast="off")

    def loss_fn(batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    return lambda: guarded(loss_fn, [(x, y)])


class Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


def count_operations(step: Loop) -> Counter[str]:
    """Return the operations that one step dispatches; on a GPU each takes several microseconds of the host."""
    with Operations() as seen:
        step()
    return seen.counts


# --- the models ---


def make_mlp(device: torch.device) -> Made:
    torch.manual_seed(0)
    layers = [nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)]
    return nn.Sequential(*layers).to(device), *make_batch(device, 128, (784,))


def make_resnet(device: torch.device) -> Made:
    torch.manual_seed(0)
    width, batch, size = (64, 128, 32) if device.type == "cuda" else (4, 2, 8)
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    before = width
    for stage in range(4):
        after = width * 2**stage
        layers += [Block(before, after, stride=1 + (stage > 0)), Block(after, after, stride=1)]
        before = after
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, 10)]
    return nn.Sequential(*layers).to(device), *make_batch(device, batch, (3, size, size))


def make_batch(device: torch.device, size: int, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    return torch.randn(size, *shape, device=device), torch.randint(0, 10, (size,), device=device)


class Block(nn.Module):
    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(after)
        self.shortcut = nn.Sequential()
        if stride > 1 or before != after:
            self.shortcut = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


if __name__ == "__main__":
    main()
