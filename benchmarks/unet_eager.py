"""U-Net 31M, 512x512, batch 8, one GPU: eager halfstep steps by precision, and what the guarded step itself costs.

    python benchmarks/unet_eager.py [--out DIR] [--tune]

Overhead: the same model, optimizer, clipping and autocast in a bare loop (`loss.backward(); clip; optimizer.step()`,
no finite check, no guard) against GuardedStep + guard, interleaved in one run. Random data that stay on the device.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from halfstep.hardware.probe import probe
from halfstep.precision.decide import decide
from halfstep.step.clip import Clip
from halfstep.step.guard import Guard
from halfstep.step.optim.by_name import build_optimizer, make_parameter_groups
from halfstep.step.schedule import ScheduleOptions, build_schedule
from halfstep.step.step import GuardedStep
from halfstep_train.workloads.segmentation.scores import segmentation_loss
from halfstep_train.workloads.segmentation.unet import UNet
from recording import store, time_steps

BATCH, SIDE = 8, 512
DEVICE = torch.device("cuda")


def model_and_batch(layout: torch.memory_format = torch.channels_last) -> tuple[UNet, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    model = UNet(in_channels=3, num_classes=2).to(DEVICE, memory_format=layout)
    image = torch.rand(BATCH, 3, SIDE, SIDE, device=DEVICE).contiguous(memory_format=layout)
    mask = torch.randint(0, 2, (BATCH, SIDE, SIDE), device=DEVICE, dtype=torch.uint8)
    return model, {"image": image, "mask": mask}


def guarded(precision: str, *, compiled: bool = False) -> Callable[[], object]:
    # Each in the layout that halfstep's `auto` begins with: strict fp32 gained nothing by channels_last (NOTES.md).
    model, batch = model_and_batch(torch.contiguous_format if precision == "fp32" else torch.channels_last)
    plan = decide(precision, probe("cuda"), model, strict=True)
    optimizer = build_optimizer("adamw", make_parameter_groups(model, 0.01), lr=1e-4)
    schedule = build_schedule(ScheduleOptions(name="cosine", total_steps=1000, warmup_steps=10))
    step = GuardedStep(plan.apply(model), optimizer, plan, clip=Clip(limit=1.0), schedules=[schedule])
    guard = Guard(scaling=plan.needs_loss_scaling)

    def loss_fn(b: dict[str, torch.Tensor]) -> torch.Tensor:
        return segmentation_loss(model(b["image"]), b["mask"])

    compute = torch.compile(loss_fn) if compiled else loss_fn
    return lambda: guard.watch(step(compute, [batch]))


def bare(*, compiled: bool = False) -> Callable[[], object]:
    model, batch = model_and_batch()
    optimizer = torch.optim.AdamW(make_parameter_groups(model, 0.01), lr=1e-4, fused=True)

    def loss_fn(b: dict[str, torch.Tensor]) -> torch.Tensor:
        return segmentation_loss(model(b["image"]), b["mask"])

    compute = torch.compile(loss_fn) if compiled else loss_fn

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = compute(batch)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def measured(make: Callable[[], Callable[[], object]], **timing: int) -> dict[str, Any]:
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    step = make()
    for _ in range(2):
        step()
    torch.cuda.synchronize()
    found: dict[str, Any] = {"first_steps_s": time.perf_counter() - start} | time_steps(step, **timing)
    found["peak_memory_gb"] = torch.cuda.max_memory_allocated() / 1e9
    print(found)
    return found


def overhead_of(*, compiled: bool) -> dict[str, Any]:
    """Both loops side by side: their windows take turns, so that a drift of the clocks meets both alike."""
    loops = {"bare": bare(compiled=compiled), "step": guarded("bf16", compiled=compiled)}
    times: dict[str, list[float]] = {name: [] for name in loops}
    for loop in loops.values():
        time_steps(loop, warmup=10, steps=1, windows=1)
    for _ in range(8):
        for name, loop in loops.items():
            times[name].append(time_steps(loop, warmup=1, steps=15, windows=1)["ms"])
    middle = {name: statistics.median(found) for name, found in times.items()}
    return {
        "bare_ms": middle["bare"],
        "step_ms": middle["step"],
        "overhead": middle["step"] / middle["bare"] - 1,
        "windows_ms": times,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", help="folder for the JSON, default benchmarks/results")
    parser.add_argument("--tune", action="store_true", help="let cuDNN try all its algorithms first")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device; `halfstep bench unet` measures on any")
    torch.backends.cudnn.benchmark = arguments.tune
    precisions = {
        name: measured(lambda n=name: guarded(n), warmup=8, steps=8, windows=5)  # type: ignore[misc]
        for name in ("fp32", "tf32", "bf16", "fp16")
    }
    overhead = {"eager": overhead_of(compiled=False), "compiled": overhead_of(compiled=True)}
    ratios = {
        name: {"speedup": precisions["fp32"]["ms"] / row["ms"],
               "memory": row["peak_memory_gb"] / precisions["fp32"]["peak_memory_gb"]}
        for name, row in precisions.items()
    }  # fmt: skip
    for name, row in precisions.items():
        print(f"{name:5} {row['ms']:7.1f} ms {row['peak_memory_gb']:6.2f} GB  {ratios[name]['speedup']:.2f}x fp32, "
              f"{ratios[name]['memory']:.2f} of its memory")  # fmt: skip
    for kind, row in overhead.items():
        print(
            f"step + guard, {kind}: {row['step_ms']:.2f} ms against {row['bare_ms']:.2f} bare: {row['overhead']:+.2%}"
        )
    results = {"batch": BATCH, "side": SIDE, "precisions": precisions, "against_fp32": ratios, "overhead": overhead}
    store("unet_eager", results | {"cudnn_benchmark": arguments.tune}, DEVICE, arguments.out)


if __name__ == "__main__":
    main()
