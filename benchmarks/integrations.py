"""Time the trainers of others: as they are at their documented best, with the guard, and captured.

    python benchmarks/integrations.py [--only trainer-gpt2,lightning-resnet18] [--rounds 9] [--out DIR] [--tiny]

    host         the trainer with bf16, fused AdamW (Lightning: foreach), clipping at 1.0 and its own torch.compile
    host eager   the same without torch.compile
    guard        `host` with the guard
    captured     the trainer's steps made by an hs.Step (fast="auto"), without the trainer's torch.compile

Random weights from a config, random tokens, loaded by the trainer's own loader. Lightning trains ResNet-18 on random
images of CIFAR's size, from pinned memory, with a cosine schedule per step and `self.log` of the loss.

Each variant is a process of its own. Those of all cases build and compile side by side, the captured ones after the
others: an hs.Step times its graphs to choose one. Then one at a time has the device, for a window of about half a
second, and the variants of a case take turns, round after round. `ms` is the median over the rounds with the smallest
and largest; `ratio` is the median over the rounds of host / variant in the same round, with its smallest and largest:
above 1 is faster than the host.

`--tiny` runs every part with small models on a CPU, to test this script.

A case is an entry of CASES: variants by name, each a function that trains and calls `turns.end_step()` after each step
until that returns False.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from own_loop import make_resnet18
from recording import finish_device_work, store

WARMUP_STEPS, MOST_WARMUP_STEPS, MOST_WARMUP_S = 30, 600, 300.0
WINDOW_S = 0.5
COMPILE_THREADS = "4"  # of Inductor in each of the processes that compile side by side
PACKAGES = ("transformers", "accelerate", "lightning", "halfstep")


class Turns:
    """The turns of one variant: warm up, then train a window whenever the starting process asks for one."""

    def __init__(self, *, tiny: bool = False) -> None:
        self.warmup = 6 if tiny else WARMUP_STEPS
        self.is_warm: Callable[[], bool] = lambda: True
        """A variant that takes longer to reach its speed says when it has."""
        self.describe: Callable[[], str] = lambda: ""
        self.began = time.perf_counter()
        self.count = self.left = 0
        self.is_ready = False

    def end_step(self) -> bool:
        """Count a step; return False when training should end."""
        self.count += 1
        if not self.is_ready:
            is_late = self.count > MOST_WARMUP_STEPS or time.perf_counter() - self.began > MOST_WARMUP_S
            if self.count < self.warmup or not (self.is_warm() or is_late):
                return True
            self.is_ready = True
            self._answer({"ready": True, "warmup_s": time.perf_counter() - self.began, "gb": reserved_gb()})
            return self._wait()
        self.left -= 1
        if self.left:
            return True
        finish_device_work()
        self._answer({"seconds": time.perf_counter() - self.start, "mode": self.describe()})
        return self._wait()

    def _answer(self, found: dict[str, Any]) -> None:
        print("TURN " + json.dumps(found), flush=True)

    def _wait(self) -> bool:
        finish_device_work()
        asked = sys.stdin.readline().split()
        if not asked:
            return False
        self.left = int(asked[0])
        self.start = time.perf_counter()
        return True


def reserved_gb() -> float:
    return torch.cuda.memory_reserved() / 1e9 if torch.cuda.is_available() else 0.0


# --- the transformers Trainer ---


class Tokens(Dataset[Any]):
    """Random tokens; a class for each row, or the row itself, as labels."""

    def __init__(self, num: int, length: int, vocabulary: int, *, has_class: bool) -> None:
        generator = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(5, vocabulary, (num, length), generator=generator)
        self.has_class = has_class

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        row = self.tokens[number]
        return {"input_ids": row, "labels": row[0] % 2 if self.has_class else row}


def make_gpt2(tiny: bool) -> tuple[Any, Any, int]:
    from transformers import GPT2Config, GPT2LMHeadModel

    if tiny:
        config = GPT2Config(vocab_size=64, n_positions=32, n_embd=16, n_layer=1, n_head=2, bos_token_id=0,
                            eos_token_id=0)  # fmt: skip
        return GPT2LMHeadModel(config), Tokens(64, 16, 64, has_class=False), 4
    return GPT2LMHeadModel(GPT2Config()), Tokens(4096, 1024, 50257, has_class=False), 8


def make_bert(tiny: bool) -> tuple[Any, Any, int]:
    from transformers import BertConfig, BertForSequenceClassification

    if tiny:
        config = BertConfig(vocab_size=64, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
                            intermediate_size=32, max_position_embeddings=32)  # fmt: skip
        return BertForSequenceClassification(config), Tokens(64, 16, 64, has_class=True), 4
    return BertForSequenceClassification(BertConfig()), Tokens(32768, 128, 30522, has_class=True), 32


def train_with_trainer(make: Callable[[bool], tuple[Any, Any, int]], variant: str) -> Callable[[Turns, bool], None]:
    def run(turns: Turns, tiny: bool) -> None:
        import transformers
        from transformers import Trainer, TrainerCallback, TrainingArguments

        import halfstep as hs

        transformers.logging.set_verbosity_error()

        class Guarded(hs.integrations.transformers.HalfstepMixin, Trainer):  # type: ignore[misc, name-defined]
            pass

        class Ends(TrainerCallback):  # type: ignore[misc]
            def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                if not turns.end_step():
                    control.should_training_stop = True

        torch.manual_seed(0)
        model, data, size = make(tiny)
        compiles = variant in ("host", "guard")
        args = TrainingArguments(
            tempfile.mkdtemp(), max_steps=1_000_000, per_device_train_batch_size=size, learning_rate=1e-4,
            lr_scheduler_type="cosine", warmup_steps=10, max_grad_norm=1.0, optim="adamw_torch_fused", bf16=not tiny,
            use_cpu=tiny, report_to=[], disable_tqdm=True, save_strategy="no", logging_steps=500,
            dataloader_num_workers=0 if tiny else 4, dataloader_persistent_workers=not tiny, torch_compile=compiles,
            **({"torch_compile_backend": "aot_eager"} if tiny and compiles else {}),
        )  # fmt: skip
        given: dict[str, Any] = {"model": model, "args": args, "train_dataset": data, "callbacks": [Ends()]}
        if variant.startswith("host"):
            trainer: Any = Trainer(**given)
        else:
            # Exact is what a GPU gets by itself; on a CPU it has to be asked for.
            trainer = Guarded(**given, halfstep=variant, schedule="exact")
            turns.describe = lambda: str(getattr(getattr(trainer.halfstep, "step", None), "mode", "guard"))
        if variant == "captured" and not tiny:
            turns.is_warm = lambda: "compile" in turns.describe()
        trainer.train()

    return run


def list_variants(make: Callable[[bool], tuple[Any, Any, int]]) -> dict[str, Callable[[Turns, bool], None]]:
    return {name: train_with_trainer(make, name) for name in ("host", "host eager", "guard", "captured")}


# --- Lightning ---


class PinnedBatches:
    """The same few batches, without an end: Trainer.fit ends when the turns do."""

    def __init__(self, size: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.batches = [
            (torch.randn(size, 3, 32, 32, generator=generator), torch.randint(0, 10, (size,), generator=generator))
            for _ in range(4)
        ]
        if torch.cuda.is_available():
            self.batches = [(images.pin_memory(), labels.pin_memory()) for images, labels in self.batches]

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return itertools.cycle(self.batches)


def train_with_lightning(variant: str) -> Callable[[Turns, bool], None]:
    def run(turns: Turns, tiny: bool) -> None:
        import lightning

        import halfstep as hs

        class Classifier(lightning.LightningModule):  # type: ignore[misc]
            def __init__(self) -> None:
                super().__init__()
                self.model = make_resnet18()

            def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
                loss = torch.nn.functional.cross_entropy(self.model(batch[0]), batch[1])
                self.log("train_loss", loss)
                return loss

            def configure_optimizers(self) -> Any:
                # Lightning's mixed precision refuses to clip the gradients of a fused optimizer: it gets foreach.
                is_fused = not variant.startswith("host")
                optimizer = torch.optim.AdamW(self.parameters(), 1e-4, fused=is_fused, foreach=not is_fused)
                scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1_000_000)
                return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

        class Ends(lightning.Callback):  # type: ignore[misc]
            def on_train_batch_end(self, trainer: Any, *rest: Any) -> None:
                if not turns.end_step():
                    trainer.should_stop = True

        torch.manual_seed(0)
        module: Any = Classifier()
        if variant in ("host", "guard"):
            # The network alone: torch 2.13 cannot compile a training_step with self.log.
            module.model = torch.compile(module.model, **({"backend": "aot_eager"} if tiny else {}))
        if variant.startswith("host"):
            how: dict[str, Any] = {"precision": "32-true" if tiny else "bf16-mixed"}
        else:
            # Nothing is captured on a CPU; there the schedule without waits has to be asked for.
            level = "guard" if tiny else variant
            more = {"fast": hs.Fast(num_steps=100_000)} if level == "captured" else {}
            plugin = hs.integrations.lightning.HalfstepPrecision(
                "fp32" if tiny else "bf16", level=level, schedule="exact", **more
            )
            how = {"plugins": [plugin]}
            turns.describe = lambda: str(getattr(plugin.step, "mode", "guard"))
        if variant == "captured" and not tiny:
            turns.is_warm = lambda: "compile" in turns.describe()
        trainer = lightning.Trainer(
            accelerator="cpu" if tiny else "gpu", devices=1, max_epochs=1, benchmark=True, gradient_clip_val=1.0,
            logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            callbacks=[Ends()], **how,
        )  # fmt: skip
        trainer.fit(module, PinnedBatches(2 if tiny else 128))

    return run


CASES: dict[str, dict[str, Callable[[Turns, bool], None]]] = {
    "trainer-gpt2": list_variants(make_gpt2),
    "trainer-bert": list_variants(make_bert),
    "lightning-resnet18": {name: train_with_lightning(name) for name in ("host", "host eager", "guard", "captured")},
}


# --- the process that starts the others ---


class Variant:
    def __init__(self, case: str, name: str, *, tiny: bool) -> None:
        self.name = name
        command = [sys.executable, __file__, "--train", case, "--variant", name, *(["--tiny"] if tiny else [])]
        self.log = Path(tempfile.mkdtemp()) / "log.txt"
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log.open("w"), text=True,
            env={"TORCHINDUCTOR_COMPILE_THREADS": COMPILE_THREADS, **os.environ},
        )  # fmt: skip
        self.found: dict[str, Any] = {}
        self.times: list[float] = []
        self.num_steps = 5

    def read(self) -> dict[str, Any] | None:
        """Return the next answer; None if the process ended, whose last words are kept."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("TURN "):
                return json.loads(line.removeprefix("TURN "))
        words = [line for line in self.log.read_text().splitlines() if line.strip()]
        self.found["problem"] = words[-1][:300] if words else "the process ended"
        return None

    def train(self, num_steps: int) -> float | None:
        """Train a window and return the seconds per step; None if the process ended."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(f"{num_steps}\n")
            self.process.stdin.flush()
        except OSError:
            self.read()
            return None
        answer = self.read()
        if answer is None:
            return None
        self.found["mode"] = answer["mode"]
        return float(answer["seconds"]) / num_steps

    def warm_up(self) -> None:
        answer = self.read()
        if answer is not None:
            self.found |= {"warmup_s": answer["warmup_s"], "gb": answer["gb"]}

    def end(self) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
        lines = [line for line in self.log.read_text().splitlines() if line.startswith("halfstep: ")]
        self.found["lines"] = lines


def start_variants(cases: list[str], only: list[str] | None, *, tiny: bool) -> dict[str, list[Variant]]:
    """Start and warm up the variants of all cases, in the order of CASES; the captured ones after the others."""
    started: dict[tuple[str, str], Variant] = {}
    names = [(case, name) for case in cases for name in CASES[case] if only is None or name in only]
    for is_captured in (False, True):
        group = [one for one in names if (one[1] == "captured") is is_captured]
        started |= {(case, name): Variant(case, name, tiny=tiny) for case, name in group}
        for one in group:
            started[one].warm_up()
    return {case: [started[one] for one in names if one[0] == case] for case in cases}


def compare(variants: list[Variant], rounds: int, *, tiny: bool) -> dict[str, Any]:
    window_s = 0.05 if tiny else WINDOW_S
    for number in range(rounds + 1):
        for one in variants:
            if "problem" in one.found:
                continue
            seconds = one.train(one.num_steps)
            if seconds is None:
                continue
            one.num_steps = max(5, round(window_s / seconds))
            if number:  # the first round sets the length of the windows
                one.times.append(seconds)
    for one in variants:
        one.end()
    host = next((one.times for one in variants if one.name == "host"), [])
    for one in variants:
        if one.times:
            one.found |= summarise("ms", [seconds * 1e3 for seconds in one.times])
        if one.times and len(host) == len(one.times):
            one.found |= summarise("ratio", [base / own for base, own in zip(host, one.times, strict=True)])
    return {one.name: one.found for one in variants}


def summarise(name: str, values: list[float]) -> dict[str, float]:
    return {name: statistics.median(values), f"{name}_min": min(values), f"{name}_max": max(values)}


def list_versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def show(case: str, found: dict[str, Any]) -> None:
    for name, one in found.items():
        if "ms" not in one:
            print(f"{case:20s}{name:12s} {one.get('problem')}", flush=True)
            continue
        ratio = f"x{one['ratio']:.3f} ({one['ratio_min']:.3f} to {one['ratio_max']:.3f})" if "ratio" in one else ""
        print(
            f"{case:20s}{name:12s}{one['ms']:9.3f} ms ({one['ms_min']:.3f} to {one['ms_max']:.3f}) {ratio} "
            f"{one['gb']:.1f} GB {one['mode']}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(CASES), help="cases, with commas")
    parser.add_argument("--variants", help="variants, with commas")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tiny", action="store_true", help="small models on the CPU")
    parser.add_argument("--out", help="folder for the JSON, default benchmarks/results")
    parser.add_argument("--train", metavar="CASE", help=argparse.SUPPRESS)
    parser.add_argument("--variant", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.train:
        CASES[arguments.train][arguments.variant](Turns(tiny=arguments.tiny), arguments.tiny)
        return
    device = torch.device("cpu" if arguments.tiny else "cuda")
    found: dict[str, Any] = {}
    only = arguments.variants.split(",") if arguments.variants else None
    started = start_variants(arguments.only.split(","), only, tiny=arguments.tiny)
    for case, variants in started.items():
        found[case] = compare(variants, arguments.rounds, tiny=arguments.tiny)
        show(case, found[case])
        store(
            "integrations_tiny" if arguments.tiny else "integrations",
            {"versions": list_versions(), "rounds": arguments.rounds, "cases": found}, device, arguments.out,
        )  # fmt: skip


if __name__ == "__main__":
    main()
