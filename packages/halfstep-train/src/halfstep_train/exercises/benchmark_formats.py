"""Exercise 1: compare time, memory and accuracy of a small CNN in fp32, fp16 and bf16.

The CNN trains on CIFAR-10's binary batches, or on generated images of that shape.
"""

from __future__ import annotations

import statistics
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from halfstep.errors import DataError, format_bytes, format_count
from halfstep.hardware.probe import probe
from halfstep_train.config.schema import RunConfig
from halfstep_train.data import binary_sets
from halfstep_train.data.loader import TensorSamples
from halfstep_train.exercises import Claim, Story
from halfstep_train.use.compare import ComparedRow, CompareRequest, Say, create_comparison, run_comparison, train_row
from halfstep_train.use.compare_table import TableLine, build_lines, collect_notes
from halfstep_train.workloads.base.kind import Kind
from halfstep_train.workloads.base.sums import Means
from halfstep_train.workloads.base.workload import Workload

WORKLOAD = "halfstep_train.exercises.benchmark_formats:KIND"
FORMATS = ("fp32", "fp16", "bf16")
SEEDS = 5
STEPS, FEWEST_STEPS, TRIED_STEPS = 60, 20, 5
MOST_S = 75.0
"""Seconds for all runs together; with imports and a first try the exercise stays below two minutes."""
MARGIN = 0.03
"""Three points: with 500 test images the accuracy varies by one point between seeds."""
EXPECTED = "1.5 to 2 times as fast, half the memory, accuracy within 0.5 points"


def run(*, data: str | None = None, seeds: int = SEEDS, steps: int = STEPS, most_s: float = MOST_S, say: Say) -> Story:
    """Train the CNN in each format with several seeds and compare them."""
    hardware = probe("auto")
    simulates = hardware.kind == "cpu"
    common = ("train.batch_size=32", "train.val_batch_size=250", "data.num_workers=0", "optimizer.lr=3e-3",
              "train.early_stopping_patience=0", f"precision.simulate={str(simulates).lower()}",
              *([f"data.dir={data}"] if data else []))  # fmt: skip
    rows = tuple(ComparedRow(name=name, overrides=(f"precision={name}",)) for name in FORMATS)
    request = CompareRequest(target=WORKLOAD, overrides=common, rows=rows, seeds=seeds, margin=MARGIN)
    with tempfile.TemporaryDirectory() as scratch:
        steps = _choose_steps(request, steps, most_s, Path(scratch) / "tried", say)
        place, comparison = create_comparison(_limit_steps(request, steps), Path(scratch) / "comparison")
        run_comparison(place, comparison, say)
    lines = build_lines(comparison)
    verdicts = comparison.judge()
    return Story(
        title="Exercise 1: benchmark fp32, fp16 and bf16",
        titles=("format", "speed", "speedup", "memory", "accuracy", "verdict"),
        rows=[_format_cells(line, lines[0]) for line in lines],
        claims=[
            Claim(text=f"{name}: the accuracy is the same within {MARGIN * 100:g} points", holds=found.word == "same")
            for name, found in verdicts.items()
        ],
        comments=[*collect_notes(comparison), *_explain_differences(lines, simulates=simulates, device=hardware.name)],
    )


def _limit_steps(request: CompareRequest, steps: int) -> CompareRequest:
    return replace(request, overrides=(*request.overrides, f"train.max_steps={steps}"))


def _choose_steps(request: CompareRequest, steps: int, most_s: float, place: Path, say: Say) -> int:
    """Return the steps per run that the time allows, estimated from a short run."""
    tried, num_runs = min(TRIED_STEPS, steps), len(request.rows) * request.seeds
    found = train_row(_limit_steps(request, tried), request.rows[1], 0, place).summary
    step_s, around_s = found["trained_s"] / tried, found["elapsed_s"] - found["trained_s"]
    # Time per run without what does not depend on the number of steps.
    fitting = max(int((most_s / num_runs - around_s) / step_s), FEWEST_STEPS)
    if fitting >= steps:
        return steps
    total_s = num_runs * (around_s + fitting * step_s)
    fewer = f"{format_count(fitting, 'step')} per run instead of {steps}"
    say(f"a step takes {step_s:.2g} s here: {fewer}, about {total_s:.0f} s in all")
    return fitting


def _format_cells(line: TableLine, baseline: TableLine) -> tuple[str, ...]:
    speed, first = line.samples_per_s, baseline.samples_per_s
    mean = statistics.mean(line.values)
    return (
        line.row,
        f"{speed:,.0f} samples/s" if speed else "simulated",
        f"{speed / first:.2f}x" if speed and first else "",
        format_bytes(line.memory_bytes, digits=3) if line.memory_bytes else "",
        f"{mean * 100:.1f} %",
        line.verdict,
    )


def _explain_differences(lines: list[TableLine], *, simulates: bool, device: str) -> list[str]:
    """Explain how and why this machine differs from the expectation."""
    means = [statistics.mean(line.values) for line in lines]
    gap = 100 * max(abs(mean - means[0]) for mean in means)
    expected = f"often expected: {EXPECTED}"
    if simulates:
        return [
            expected,
            f"measured here: accuracy within {gap:.1f} points of fp32; time and memory are not measured",
            f"{device} has no matrix units for fp16 and bf16: the formats are simulated, which shows their numerics "
            "(real dtypes, real rounding) and says nothing about time or memory",
            "for times, run this on a GPU with tensor cores: bf16 from Ampere (A100, RTX 30) on, fp16 from Volta on",
        ]
    first, half = lines[0], lines[-1]
    ratio = (half.samples_per_s or 1) / (first.samples_per_s or 1)
    comments = [
        expected,
        f"measured here: {ratio:.2f} times as fast in {half.row}, accuracy within {gap:.1f} points",
    ]
    if ratio < 1.5:
        comments.append(
            "a model this small is limited by the host, not the GPU: larger batches and models show the gain"
        )
    comments.append("fp32 is strict here; compared with TF32, the default of many frameworks, the gain is smaller")
    return comments


SIDE, NUM_CLASSES = 32, 10
MOST_TESTED = 1000
"""Of CIFAR-10's 10,000 test images, so that fifteen runs validate within two minutes on two cores."""


def read_cifar(root: Path) -> tuple[TensorSamples, TensorSamples]:
    """Read the binary version's training batches (one to five) and its test batch."""
    folder = binary_sets.find_cifar_folder(root)
    if folder is None:
        raise DataError(
            f"{root} contains no CIFAR-10",
            why="the binary version is expected: data_batch_1.bin to data_batch_5.bin and test_batch.bin",
            fix="unpack cifar-10-binary.tar.gz there, or leave the folder out for generated images",
        )
    _, train, test = binary_sets.read_cifar(folder)
    pixels, tested = (images.pixels.permute(0, 3, 1, 2) for images in (train, test))
    few = TensorSamples(image=tested[:MOST_TESTED], label=test.labels[:MOST_TESTED])
    return TensorSamples(image=pixels, label=train.labels), few


def generate_images(count: int, seed: int) -> TensorSamples:
    """Generate noisy gratings: angle and frequency define the class, colour and phase are random."""
    draws = np.random.default_rng(seed)
    labels = draws.integers(0, NUM_CLASSES, count)
    angle = (labels % 5) * np.pi / 5 + draws.normal(0, 0.12, count)
    waves = np.where(labels < 5, 2.0, 4.0) * draws.uniform(0.8, 1.25, count)
    y, x = np.mgrid[0:SIDE, 0:SIDE] / SIDE
    along = np.cos(angle)[:, None, None] * x + np.sin(angle)[:, None, None] * y
    phase = draws.uniform(0, 2 * np.pi, count)[:, None, None]
    grating = np.sin(2 * np.pi * waves[:, None, None] * along + phase)
    colour = draws.uniform(0.2, 1.0, (count, 3, 1, 1))
    pixels = 128 + 60 * colour * grating[:, None] + draws.normal(0, 60, (count, 3, SIDE, SIDE))
    image = torch.from_numpy(pixels.clip(0, 255).astype(np.uint8))
    return TensorSamples(image=image, label=torch.from_numpy(labels))


class SmallCnn(nn.Sequential):
    def __init__(self) -> None:
        blocks: list[nn.Module] = []
        for inputs, outputs in ((3, 8), (8, 16), (16, 32)):
            convolution = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
            blocks += [convolution, nn.BatchNorm2d(outputs), nn.ReLU(), nn.MaxPool2d(2)]
        super().__init__(*blocks, nn.Flatten(), nn.Linear(32 * 16, NUM_CLASSES))


def prepare(batch: dict[str, Tensor], *, key: Any, training: bool) -> dict[str, Tensor]:
    return {"image": (batch["image"].float() - 128) / 64, "label": batch["label"]}


def build(config: RunConfig, store: Any = None) -> Workload:
    """Build the workload of the exercise: a small CNN on CIFAR-10 or generated images."""
    folder = config.data.dir
    train, test = read_cifar(Path(folder)) if folder else (generate_images(1200, 0), generate_images(500, 1))
    return Workload(
        name="small_cnn",
        model=SmallCnn(),
        train_samples=train,
        val_samples=test,
        prepare=prepare,
        forward=lambda model, batch: model(batch["image"]),
        loss=lambda outputs, batch: F.cross_entropy(outputs, batch["label"]),
        metrics=lambda: Means(accuracy=lambda outputs, batch: outputs.argmax(1) == batch["label"]),
        metric="accuracy",
    )


KIND = Kind(builder=build, takes_channels_last=True)
