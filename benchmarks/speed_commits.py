"""Time a training step of two checkouts in turn: does a change of the code change the speed?

    git worktree add .old COMMIT
    python benchmarks/speed_commits.py .old . [--only unet,resnet50_64] [--pairs 9] [--mode graph] [--out DIR]

Each checkout trains each case of speed_cases.py and each workload of OTHERS in its own process. All compile side by
side, each checkout into an empty cache: `cold_s` are the seconds from the start of a process to its step 20. Then one
case at a time is timed, in windows that alternate between the checkouts, so that clocks and heat affect both; `warm_s`
are the seconds to step 20 of these processes. The ratio new/old of each pair of windows gives a mean and its 95 %
interval.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

import torch

OTHERS: dict[str, tuple[int, tuple[str, ...]]] = {
    "gpt2": (16, ()),
    "diffusion": (16, ()),
    "radiodiff": (8, ("model.scale_factor=0.3",)),
    "slotcontrast": (16, ("preset=movi_e", "model.backbone_weights=random")),
}
"""Workloads next to the first table of docs/results.md, with the size of a batch and settings."""
WARM_UP, WINDOW = 20, 20
READY, GO = "ready", "go"
T_95 = {6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262, 10: 2.228, 11: 2.201, 12: 2.179, 14: 2.145, 16: 2.120, 20: 2.086}
"""Student's t, two-sided 95 %, by degrees of freedom."""
ENDLESS = 1_000_000
"""Steps: a training process ends when its parent ends it."""


@dataclass
class Trainer:
    """The process that trains one case in one checkout."""

    process: subprocess.Popen[str]
    commands: IO[str]
    answers: IO[str]
    began: float = field(default_factory=time.time)

    def read(self) -> str:
        for line in self.answers:
            if line.startswith("speed_commits "):
                return line.split(" ", 1)[1].strip()
        raise RuntimeError(f"a training process ended with code {self.process.wait()} before it was timed")

    def wait(self) -> float:
        """Wait until its warm-up is over; return the seconds from its start until then."""
        word, ended = self.read().split()
        assert word == READY
        return float(ended) - self.began

    def time_window(self) -> float:
        """Let it train for one window; return milliseconds per step."""
        self.commands.write(f"{GO}\n")
        self.commands.flush()
        return float(self.read())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path, help="a checkout")
    parser.add_argument("new", type=Path, help="another one")
    parser.add_argument("--only", default="", help="cases, with commas")
    parser.add_argument("--pairs", type=int, default=9, choices=[dof + 1 for dof in T_95])
    parser.add_argument("--mode", default="graph", help="eager, compile or graph")
    parser.add_argument("--out", help="folder for the JSON, default benchmarks/results")
    parser.add_argument("--train", metavar="CASE", help=argparse.SUPPRESS)  # in a training process
    arguments = parser.parse_args()
    if arguments.train:
        train(arguments.train, arguments.mode)
        return
    from recording import store
    from speed_cases import TABLE

    cases = [word for word in arguments.only.split(",") if word] or [*TABLE, *OTHERS]
    trees = (arguments.old, arguments.new)
    commits = {"old": commit_of(arguments.old), "new": commit_of(arguments.new)}
    with tempfile.TemporaryDirectory() as folder:
        caches = [Path(folder, name) for name in ("old", "new")]
        cold_s = fill_caches(cases, trees, caches, arguments)
        found = {}
        for case in cases:
            old, new = (start(case, *pair, arguments) for pair in zip(trees, caches, strict=True))
            warm_s = [old.wait(), new.wait()]
            found[case] = compare(old, new, num_pairs=arguments.pairs) | {"cold_s": cold_s[case], "warm_s": warm_s}
            old.process.kill(), new.process.kill()
            print(case, {name: value for name, value in found[case].items() if name != "pairs_ms"}, flush=True)
            result = {**commits, "mode": arguments.mode, "cases": found}
            store("speed_commits", result, torch.device("cuda"), arguments.out)


def fill_caches(
    cases: list[str], trees: tuple[Path, Path], caches: list[Path], arguments: argparse.Namespace
) -> dict[str, list[float]]:
    """Compile all cases at once, and return the seconds of each checkout. Choices between compiled kernels made on a
    busy device are forgotten."""
    from speed_processes import forget_choices

    trainers = [[start(case, *pair, arguments) for pair in zip(trees, caches, strict=True)] for case in cases]
    seconds = {case: [trainer.wait() for trainer in pair] for case, pair in zip(cases, trainers, strict=True)}
    for trainer in itertools.chain(*trainers):
        trainer.process.kill()
    for cache in caches:
        forget_choices(cache, 0.0)
    return seconds


def start(case: str, tree: Path, cache: Path, arguments: argparse.Namespace) -> Trainer:
    from code_numbers import find_sources  # not in every old checkout

    sources = [str(source.parent) for source in find_sources(tree.resolve())]
    paths = [*sources, str(tree.resolve() / "benchmarks"), os.environ.get("PYTHONPATH", "")]
    process = subprocess.Popen(
        [sys.executable, __file__, str(arguments.old), str(arguments.new), "--train", case, "--mode", arguments.mode],
        env={
            **os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1",
            "TORCHINDUCTOR_CACHE_DIR": str(cache), "TRITON_CACHE_DIR": str(cache / "triton"),
        },
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    return Trainer(process, process.stdin, process.stdout)


def train(name: str, mode: str) -> None:
    """Train a case with this process's halfstep; after the warm-up, one window for each line of stdin.

    Only names that both checkouts have are used, and `speed` is the checkout's own.
    """
    import speed
    from speed_cases import CASES, row_requests
    from speed_processes import only_runner, own_decisions

    size, words = OTHERS.get(name, (0, ()))
    other = replace(CASES["vit_l_64"], workload=name, batch_size=size, image_size=None, words=words, against=())
    case = other if name in OTHERS else CASES[name]
    with own_decisions():
        request = row_requests(case, (mode,))[f"halfstep {mode}"]
        hardware = speed.measure(speed.probe("cuda"))
        only_runner(case, request, hardware).train(ENDLESS, WindowClock(WINDOW))


class WindowClock:
    """Called after each step of a training process: after the warm-up it times a window for each GO on stdin."""

    def __init__(self, window: int, before_ready: Callable[[], None] = lambda: None) -> None:
        self.window, self.before_ready = window, before_ready
        self.num_steps = 0
        self.started = 0.0

    def __call__(self) -> None:
        self.num_steps += 1
        past = self.num_steps - WARM_UP
        if past < 0 or past % self.window:
            return
        torch.cuda.synchronize()
        if past == 0:
            self.before_ready()
            answer(f"{READY} {time.time()}")
        else:
            answer(f"{(time.perf_counter() - self.started) / self.window * 1e3}")
        if sys.stdin.readline().strip() != GO:
            raise SystemExit
        self.started = time.perf_counter()


def answer(text: str) -> None:
    print(f"speed_commits {text}", flush=True)


def compare(old: Trainer, new: Trainer, *, num_pairs: int) -> dict[str, Any]:
    old.time_window(), new.time_window()  # the clocks rise
    pairs = []
    for turn in range(num_pairs):
        # Which of the two comes first alternates, so that a drift within a pair cancels.
        first, second = (old, new) if turn % 2 == 0 else (new, old)
        times = first.time_window(), second.time_window()
        pairs.append(times if turn % 2 == 0 else times[::-1])
    ratios = [after / before for before, after in pairs]
    half = T_95[num_pairs - 1] * statistics.stdev(ratios) / num_pairs**0.5
    mean = statistics.fmean(ratios)
    return {
        "old_ms": statistics.median(before for before, _ in pairs),
        "new_ms": statistics.median(after for _, after in pairs),
        "ratio": mean,
        "ratio_95": [mean - half, mean + half],
        "pairs_ms": pairs,
    }


def commit_of(tree: Path) -> str:
    """The commit of a checkout; a copy without git says so in a file COMMIT."""
    if (tree / "COMMIT").exists():
        return (tree / "COMMIT").read_text().strip()
    return subprocess.run(
        ["git", "-C", str(tree), "rev-parse", "HEAD"], capture_output=True, text=True, check=True
    ).stdout.strip()


if __name__ == "__main__":
    main()
