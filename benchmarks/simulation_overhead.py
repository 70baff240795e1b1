"""How much slower a simulated training step is than fp32 on a CPU, for a small U-Net. Bound: 1.3x.

    python benchmarks/simulation_overhead.py [--base 16] [--size 96] [--batch 4] [--steps 12] [--threads 1]

Steps of all formats are interleaved and timed in CPU seconds, so that a busy machine does not count; medians compared.
Prints a table and stores benchmarks/results/simulation_overhead.json.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from pathlib import Path
from types import MappingProxyType

import torch
from torch import nn

from halfstep.hardware.facts import Hardware
from halfstep.islands import fp32_island
from halfstep.models.unet import UNet
from halfstep.precision.decide import decide
from halfstep.precision.plan import Plan

RESULTS = Path(__file__).parent / "results" / "simulation_overhead.json"
FORMATS = ("fp32", "bf16", "fp16", "tf32")
BOUND = 1.3

CPU = Hardware(
    kind="cpu", device="cpu", name=platform.machine(), vendor="", support=MappingProxyType({"fp32": "native"})
)


class Trial:
    """One model with its optimizer, stepped under one plan."""

    def __init__(self, format: str, base_channels: int) -> None:
        torch.manual_seed(0)
        self.model = UNet(num_classes=1, base_channels=base_channels)
        self.plan: Plan = decide(format, CPU, self.model, simulate=format != "fp32")
        self.plan.apply(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.times_s: list[float] = []

    def step(self, images: torch.Tensor, masks: torch.Tensor) -> None:
        start = time.process_time()
        with self.plan.forward():
            logits = self.model(images)
            with fp32_island():
                loss = nn.functional.binary_cross_entropy_with_logits(logits.float(), masks)
        with self.plan.backend():
            self.optimizer.zero_grad()
            loss.backward()
        self.optimizer.step()
        self.times_s.append(time.process_time() - start)


def measure(args: argparse.Namespace) -> dict[str, list[float]]:
    trials = {format: Trial(format, args.base) for format in FORMATS}
    images = torch.rand(args.batch, 3, args.size, args.size)
    masks = (torch.rand(args.batch, 1, args.size, args.size) > 0.5).float()
    for _ in range(args.warmup + args.steps):
        for trial in trials.values():
            trial.step(images, masks)
    return {format: trial.times_s[args.warmup :] for format, trial in trials.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in {"base": 16, "size": 96, "batch": 4, "steps": 12, "warmup": 2, "threads": 1}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    times = measure(args)
    fp32_s = statistics.median(times["fp32"])
    rows = {
        format: {
            "median_ms": round(1e3 * statistics.median(values), 1),
            "spread_ms": round(1e3 * statistics.stdev(values), 1),
            "times_fp32": round(statistics.median(values) / fp32_s, 3),
        }
        for format, values in times.items()
    }
    for format, row in rows.items():
        print(f"{format:5} {row['median_ms']:8.1f} ms ± {row['spread_ms']:.1f}   {row['times_fp32']:.2f}x fp32")
    machine = {"machine": platform.machine(), "processor": platform.processor(), "torch": torch.__version__}
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps({"machine": machine, "settings": vars(args), "bound": BOUND, "rows": rows}, indent=2))
    return 0 if max(rows[name]["times_fp32"] for name in ("bf16", "fp16")) <= BOUND else 1


if __name__ == "__main__":
    raise SystemExit(main())
