"""Images a second into the device: files, packed cache, and the usual PIL + DataLoader loop, at equal worker count.

    python benchmarks/input_pipeline.py DIR [--workers 2] [--batch 64] [--size 224] [--rounds 5] [--device cpu]

DIR is an image folder (train/<class>/*). Its pictures are measured as they are and, since ImageNet's average is about
500x375, enlarged to that. Epochs of all loops are interleaved, each after one to warm up; medians and the spread over
rounds are reported, ratios are medians of ratios within a round; on a machine with other work, the ones of processor
time (this process and its workers) are those to trust. Goals on two cores: files 1.5x, packed 8x.
The "ready" rows add what the model needs on top (crop, flip, normalise on the device); on a CPU these share its cores.
Prints a table and stores benchmarks/results/input_pipeline_DEVICE.json.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import PIL
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from halfstep.own_loop.prefetch import prefetch
from halfstep_train.data.image_folder import FolderLayout, Listing, find_images
from halfstep_train.data.image_samples import TrainingFiles, TrainingImages
from halfstep_train.data.loader import Loader
from halfstep_train.data.packed import PackSettings, pack
from halfstep_train.workloads.classification.augment import MEAN, STD, ImageChanges, prepare_images

RESULTS = Path(__file__).parent / "results"
LARGE = (500, 375)
USUAL = "usual loop"
GOALS = {"files": 1.5, "packed": 8.0}
Epoch = Callable[[int], int]
"""Runs one epoch and says how many images reached the device."""


class UsualDataset(Dataset[tuple[Tensor, int]]):
    """What torchvision's ImageFolder with RandomResizedCrop, flip, ToTensor and Normalize does for each sample."""

    def __init__(self, listing: Listing, size: int) -> None:
        self.listing, self.size = listing, size
        self.mean, self.std = (torch.tensor(v).view(3, 1, 1) for v in (MEAN, STD))

    def __len__(self) -> int:
        return len(self.listing)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        with self.listing.paths[index].open("rb") as file:
            image = Image.open(file).convert("RGB")
        left, top, width, height = self.crop_box(*image.size)
        image = image.crop((left, top, left + width, top + height))
        image = image.resize((self.size, self.size), Image.Resampling.BILINEAR)
        if random.random() < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        pixels = torch.from_numpy(np.array(image, copy=True)).permute(2, 0, 1).contiguous()
        normalised = pixels.to(torch.float32).div(255).clone().sub_(self.mean).div_(self.std)
        return normalised, self.listing.labels[index]

    @staticmethod
    def crop_box(width: int, height: int) -> tuple[int, int, int, int]:
        for _ in range(10):
            area = width * height * random.uniform(0.08, 1.0)
            ratio = math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3)))
            wide, tall = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if 0 < wide <= width and 0 < tall <= height:
                return random.randint(0, width - wide), random.randint(0, height - tall), wide, tall
        side = min(width, height)
        return (width - side) // 2, (height - side) // 2, side, side


def usual_loop(listing: Listing, options: argparse.Namespace) -> Epoch:
    loader = DataLoader(
        UsualDataset(listing, options.size),
        batch_size=options.batch,
        shuffle=True,
        num_workers=options.workers,
        persistent_workers=options.workers > 0,
        pin_memory=options.device.startswith("cuda"),
    )

    def epoch(number: int) -> int:
        return counted((images.to(options.device, non_blocking=True) for images, _ in loader), options.device)

    return epoch


def our_loop(samples: TrainingFiles | TrainingImages, options: argparse.Namespace, *, ready: bool) -> Epoch:
    loader = Loader(samples, batch_size=options.batch, num_workers=options.workers)

    def epoch(number: int) -> int:
        batches = prefetch(loader.iterate_epoch(number), options.device)
        if not ready:
            return counted((batch["image"] for batch in batches), options.device)
        changes = ImageChanges()
        images = (prepare_images(b, options.size, changes=changes, key=(0, i)) for i, b in enumerate(batches))
        return counted(images, options.device)

    return epoch


def counted(batches: Iterable[Tensor], device: str) -> int:
    total = sum(len(batch) for batch in batches)
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    return total


def measure(folder: Path, options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Images a second of each loop over the training pictures of a folder."""
    found = find_images(folder, FolderLayout())
    with tempfile.TemporaryDirectory() as scratch:
        start = time.perf_counter()
        packed = pack(found, Path(scratch) / "images.pack", PackSettings(workers=options.workers))
        pack_s = time.perf_counter() - start
        files, stored = TrainingFiles(found.train, size=options.size), TrainingImages(packed.train)
        loops = {
            USUAL: usual_loop(found.train, options),
            "files": our_loop(files, options, ready=False),
            "packed": our_loop(stored, options, ready=False),
            "files, ready": our_loop(files, options, ready=True),
            "packed, ready": our_loop(stored, options, ready=True),
        }
        rates = interleaved(loops, options.rounds)
    summary = {name: summarised(rate, rates[USUAL]) for name, rate in rates.items()}
    total = len(found.train) + len(found.val)
    return summary | {"packing": {"images_per_s": round(total / pack_s, 1), "images": total}}


Rates = list[tuple[float, float]]
"""Of each round: images per second, and images per second of processor time."""


def interleaved(loops: dict[str, Epoch], rounds: int) -> dict[str, Rates]:
    rates: dict[str, Rates] = {name: [] for name in loops}
    for number in range(rounds + 1):
        for name, epoch in loops.items():
            start, cpu_start = time.perf_counter(), cpu_seconds()
            count = epoch(number)
            if number > 0:  # the first one starts workers and fills the page cache
                rates[name].append((count / (time.perf_counter() - start), count / (cpu_seconds() - cpu_start)))
    return rates


def cpu_seconds() -> float:
    """Processor time of this process and its workers."""
    workers = [Path(f"/proc/{child.pid}/stat") for child in multiprocessing.active_children()]
    ticks = [path.read_text().rpartition(")")[2].split()[11:13] for path in workers]
    return time.process_time() + sum(int(tick) for pair in ticks for tick in pair) / os.sysconf("SC_CLK_TCK")


def summarised(measured: Rates, usual_loop: Rates) -> dict[str, float]:
    rates, cpu_rates = zip(*measured, strict=True)
    usual, usual_cpu = zip(*usual_loop, strict=True)
    ratios = [rate / reference for rate, reference in zip(rates, usual, strict=True)]
    cpu_ratios = [rate / reference for rate, reference in zip(cpu_rates, usual_cpu, strict=True)]
    return {
        "images_per_cpu_s": round(statistics.median(cpu_rates), 1),
        "cpu_times_usual": round(statistics.median(cpu_ratios), 2),
        "images_per_s": round(statistics.median(rates), 1),
        "slowest": round(min(rates), 1),
        "fastest": round(max(rates), 1),
        "times_usual": round(statistics.median(ratios), 2),
        "times_usual_min": round(min(ratios), 2),
        "times_usual_max": round(max(ratios), 2),
    }


def enlarge(source: Path, target: Path) -> None:
    for number, path in enumerate(sorted(source.glob("*/*/*"))):
        copy = target / path.relative_to(source)
        copy.parent.mkdir(parents=True, exist_ok=True)
        size = LARGE if number % 4 else LARGE[::-1]
        Image.open(path).convert("RGB").resize(size, Image.Resampling.LANCZOS).save(copy, format="JPEG", quality=92)


def device_name(device: str) -> str:
    return torch.cuda.get_device_name(device) if device.startswith("cuda") else f"{platform.machine()} CPU"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        enlarge(options.folder, Path(scratch))
        measured = {
            f"{options.folder.name}, as it is": measure(options.folder, options),
            f"{options.folder.name}, enlarged to {LARGE[0]}x{LARGE[1]}": measure(Path(scratch), options),
        }
    result = {
        "command": "python benchmarks/input_pipeline.py " + " ".join([options.folder.name, *sys.argv[2:]]),
        "device": device_name(options.device),
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "pillow": PIL.__version__},
        "settings": {name: getattr(options, name) for name in ("workers", "batch", "size", "rounds")},
        "goals_times_usual": GOALS,
        "results": measured,
    }
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"input_pipeline_{options.device.split(':')[0]}.json"
    path.write_text(json.dumps(result, indent=2) + "\n")
    for name, rows in measured.items():
        print(name)
        for row, values in rows.items():
            print(f"  {row:14}", "  ".join(f"{key} {value:>8g}" for key, value in values.items()))


if __name__ == "__main__":
    main()
