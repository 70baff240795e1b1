"""Lightning on ResNet-18 for CIFAR (batches of 128): Lightning at its best, and the two levels of halfstep in it.

    python benchmarks/integrations_lightning.py [--rounds 7] [--only host,captured] [--out DIR] [--tiny]

bf16, fused AdamW, clipping at 1.0, a cosine schedule per step, `self.log` of the loss in every step; batches come from
pinned memory, and Lightning copies them. All variants use Trainer(benchmark=True) without logger, progress bar and
checkpoints.

    host                 Trainer(precision="bf16-mixed")
    host compiled        the same with torch.compile(module)
    host overhead        the same with torch.compile(module, mode="reduce-overhead")
    guard                Trainer(plugins=[HalfstepPrecision("bf16", level="guard")])
    captured             HalfstepPrecision("bf16", level="captured", fast="graph")
    captured auto        HalfstepPrecision("bf16", level="captured", fast="auto", num_steps=100_000)

Each variant is one process and one Trainer.fit. Its loader waits for its turn between two windows of steps, so that the
variants take turns on the device. `ms` is the median over the rounds, with the smallest and largest.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from own_loop import make_resnet18
from recording import store

WINDOW_S, NUM_BATCHES = 0.5, 4
FEW, MANY, MOST_WARMUP_S = 30, 400, 240.0  # steps before the first window; "captured auto" compiles after many
VARIANTS: dict[str, dict[str, Any]] = {
    "host": {},
    "host compiled": {"compile": {}},
    "host overhead": {"compile": {"mode": "reduce-overhead"}},
    "guard": {"plugin": {"level": "guard"}},
    "captured": {"plugin": {"level": "captured", "fast": "graph"}},
    "captured auto": {"plugin": {"level": "captured", "fast": "auto", "num_steps": 100_000}},
}


# --- the process of one variant ---


class TurnLoader:
    """Yield batches, and at the end of each window report its time and wait for the next turn."""

    def __init__(self, batches: list[tuple[Tensor, Tensor]], *, warmup: int, is_tiny: bool) -> None:
        self.batches, self.warmup, self.is_tiny = batches, warmup, is_tiny

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        began = time.perf_counter()
        for number in range(self.warmup):
            yield self.batches[number % len(self.batches)]
            if number > FEW and time.perf_counter() - began > MOST_WARMUP_S:
                break
        wait_for_device()
        gb = torch.cuda.memory_reserved() / 1e9 if torch.cuda.is_available() else 0.0
        print(json.dumps({"warmup_s": time.perf_counter() - began, "gb": gb}), flush=True)
        num = 2 if self.is_tiny else 20
        while sys.stdin.readline().strip() == "go":
            began = time.perf_counter()
            for number in range(num):
                yield self.batches[number % len(self.batches)]
            wait_for_device()
            seconds = (time.perf_counter() - began) / num
            num = num if self.is_tiny else max(10, round(WINDOW_S / seconds))
            print(json.dumps({"ms": seconds * 1e3}), flush=True)


def wait_for_device() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def run_variant(name: str, *, is_tiny: bool) -> None:
    import lightning as L

    from halfstep.integrations.lightning import HalfstepPrecision

    class Classifier(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = make_resnet18()

        def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
            loss = F.cross_entropy(self.model(batch[0]), batch[1])
            self.log("train_loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), 1e-4, fused=True)
            scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1_000_000)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    options = VARIANTS[name]
    torch.manual_seed(0)
    module: Any = Classifier()
    on_gpu, precision = torch.cuda.is_available(), "fp32" if is_tiny else "bf16"
    if "plugin" in options:
        settings = options["plugin"] if on_gpu else {"level": "auto"}  # nothing is captured on a CPU
        how: dict[str, Any] = {"plugins": [HalfstepPrecision(precision, **settings)]}
    else:
        how = {"precision": "32-true" if is_tiny else "bf16-mixed"}
    if "compile" in options and on_gpu:
        module = torch.compile(module, **options["compile"])
    num = 2 if is_tiny else 128
    torch.manual_seed(1)
    batches = [(torch.randn(num, 3, 32, 32), torch.randint(0, 10, (num,))) for _ in range(NUM_BATCHES)]
    if on_gpu:
        batches = [(x.pin_memory(), y.pin_memory()) for x, y in batches]
    warmup = 2 if is_tiny else MANY if name == "captured auto" else FEW
    trainer = L.Trainer(
        accelerator="gpu" if on_gpu else "cpu", devices=1, max_epochs=1, benchmark=True, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, gradient_clip_val=1.0, **how,
    )  # fmt: skip
    trainer.fit(module, TurnLoader(batches, warmup=warmup, is_tiny=is_tiny))


# --- the process that starts the others ---


class Variant:
    def __init__(self, name: str, *, is_tiny: bool) -> None:
        command = [sys.executable, __file__, "--run", name, *(["--tiny"] if is_tiny else [])]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.times: list[float] = []

    def read(self) -> dict[str, Any]:
        """Return the next line of JSON; Lightning prints others. Empty if the process has ended."""
        assert self.process.stdout is not None
        line = next((line for line in self.process.stdout if line.startswith("{")), "{}")
        found: dict[str, Any] = json.loads(line)
        return found

    def tell(self, word: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(word + "\n")
        self.process.stdin.flush()


def measure(names: list[str], rounds: int, *, is_tiny: bool) -> dict[str, Any]:
    found: dict[str, Any] = {}
    variants: dict[str, Variant] = {}
    for name in names:  # one after the other: compiling takes all cores
        variant = Variant(name, is_tiny=is_tiny)
        found[name] = variant.read()
        if found[name]:
            variants[name] = variant
        else:
            found[name] = {"problem": f"the process ended with {variant.process.wait()}"}
    for number in range(rounds + 1):
        for name, variant in list(variants.items()):
            variant.tell("go")
            ms = variant.read().get("ms")
            if ms is None:
                found[name] = {"problem": f"the process ended with {variants.pop(name).process.wait()}"}
            elif number:  # the first round sets the length of the windows
                variant.times.append(ms)
    for name, variant in variants.items():
        variant.tell("end")
        variant.process.wait()
        times = variant.times
        found[name] |= {"ms": statistics.median(times), "ms_min": min(times), "ms_max": max(times)}
    return found


def show(found: dict[str, Any]) -> None:
    host = found.get("host", {}).get("ms")
    for name, one in found.items():
        if "ms" not in one:
            print(f"{name:16s}{one['problem']}")
            continue
        ratio = f"{host / one['ms']:6.2f} times the host" if host else ""
        print(f"{name:16s}{one['ms']:9.3f} ms ({one['ms_min']:.3f} to {one['ms_max']:.3f}) {ratio}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(VARIANTS), help="variants, with commas")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tiny", action="store_true", help="two tiny steps in fp32, to try the script on a CPU")
    parser.add_argument("--out", help="folder for the JSON, default benchmarks/results")
    parser.add_argument("--run", metavar="VARIANT", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run:
        run_variant(arguments.run, is_tiny=arguments.tiny)
        return
    found = measure(arguments.only.split(","), arguments.rounds, is_tiny=arguments.tiny)
    show(found)
    if not arguments.tiny:
        results = {"rounds": arguments.rounds, "batch": 128, "variants": found}
        store("integrations_lightning", results, torch.device("cuda"), arguments.out)


if __name__ == "__main__":
    main()
