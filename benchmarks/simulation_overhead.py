"""How much slower a simulated training step is than fp32 on a CPU. Bound: 1.3x for a small U-Net in bf16 and fp16.

    python benchmarks/simulation_overhead.py [--base 16] [--size 96] [--batch 4] [--steps 12] [--print-only]

fp8 swaps Linear layers, of which a U-Net has none: it is timed on a small vision transformer, beside bf16 and fp32.
Steps of all formats are interleaved and timed in CPU seconds, so that a busy machine does not count; medians compared.
Prints two tables and stores benchmarks/results/simulation_overhead.json.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType

import torch
from torch import nn

from halfstep.hardware.device_facts import Hardware
from halfstep.islands import fp32_island
from halfstep.precision.decide import decide
from halfstep.precision.plan import Plan
from halfstep_train.models.vit import ViT, ViTSize
from halfstep_train.workloads.segmentation.unet import UNet

RESULTS = Path(__file__).parent / "results" / "simulation_overhead.json"
UNET_FORMATS = ("fp32", "bf16", "fp16", "tf32")
VIT_FORMATS = ("fp32", "bf16", "fp8")
VIT = ViTSize(depth=4, heads=6, dim=384, mlp_dim=1536)
"""A third of ViT-S: its layers, fewer of them."""
BOUND = 1.3

CPU = Hardware(
    kind="cpu", device="cpu", name=platform.machine(), vendor="", support=MappingProxyType({"fp32": "native"})
)


class Trial:
    """One model with its optimizer, stepped under one plan."""

    def __init__(self, format: str, build: Callable[[], nn.Module]) -> None:
        torch.manual_seed(0)
        self.model = build()
        self.plan: Plan = decide(format, CPU, self.model, simulate=format != "fp32")
        self.plan.apply(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.times_s: list[float] = []

    def step(self, images: torch.Tensor, targets: torch.Tensor) -> None:
        start = time.process_time()
        with self.plan.forward():
            logits = self.model(images)
            with fp32_island():
                loss = nn.functional.binary_cross_entropy_with_logits(logits.float(), targets)
        with self.plan.backend():
            self.optimizer.zero_grad()
            loss.backward()
        self.optimizer.step()
        self.times_s.append(time.process_time() - start)


def unet_times(args: argparse.Namespace) -> dict[str, list[float]]:
    trials = {name: Trial(name, lambda: UNet(num_classes=1, base_channels=args.base)) for name in UNET_FORMATS}
    images = torch.rand(args.batch, 3, args.size, args.size)
    return interleaved(trials, images, (torch.rand(args.batch, 1, args.size, args.size) > 0.5).float(), args)


def vit_times(args: argparse.Namespace) -> dict[str, list[float]]:
    trials = {name: Trial(name, lambda: ViT(VIT, num_classes=16, image_size=args.size)) for name in VIT_FORMATS}
    return interleaved(trials, torch.rand(args.batch, 3, args.size, args.size), torch.rand(args.batch, 16), args)


def interleaved(
    trials: dict[str, Trial], images: torch.Tensor, targets: torch.Tensor, args: argparse.Namespace
) -> dict[str, list[float]]:
    for _ in range(args.warmup + args.steps):
        for trial in trials.values():
            trial.step(images, targets)
    return {name: trial.times_s[args.warmup :] for name, trial in trials.items()}


def summary(times: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    fp32_s = statistics.median(times["fp32"])
    return {
        name: {
            "median_ms": round(1e3 * statistics.median(values), 1),
            "spread_ms": round(1e3 * statistics.stdev(values), 1),
            "times_fp32": round(statistics.median(values) / fp32_s, 3),
        }
        for name, values in times.items()
    }


def show(title: str, rows: dict[str, dict[str, float]]) -> None:
    print(title)
    for name, row in rows.items():
        print(f"  {name:5} {row['median_ms']:8.1f} ms ± {row['spread_ms']:.1f}   {row['times_fp32']:.2f}x fp32")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in {"base": 16, "size": 96, "batch": 4, "steps": 12, "warmup": 2, "threads": 1}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--print-only", action="store_true", help="store nothing: the machine is busy")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rows, vit_rows = summary(unet_times(args)), summary(vit_times(args))
    show(f"U-Net, {args.base} channels", rows)
    show(f"vision transformer, {VIT.depth} layers of {VIT.dim}", vit_rows)
    machine = {"machine": platform.machine(), "processor": platform.processor(), "torch": torch.__version__}
    if not args.print_only:
        settings = {name: value for name, value in vars(args).items() if name != "print_only"}
        record = {
            "command": " ".join(["python", *sys.argv]),
            "machine": machine,
            "settings": settings,
            "bound": BOUND,
            "rows": rows,
            "vit_rows": vit_rows,
        }
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps(record, indent=2))
    return 0 if max(rows[name]["times_fp32"] for name in ("bf16", "fp16")) <= BOUND else 1


if __name__ == "__main__":
    raise SystemExit(main())
