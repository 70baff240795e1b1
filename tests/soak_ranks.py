"""`make soak`: processes of a run are killed at random points, thirty times; nothing may be lost, nobody may hang.

    PYTHONPATH=tests/support python tests/soak_ranks.py [NUM_KILLS] [SEED]

Each round resumes the run with two or three processes and kills one after a random time. The result goes to
benchmarks/results/soak_ranks.json.
"""

from __future__ import annotations

import json
import os
import platform
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ranks_together import free_port
from warm_processes import FORKED

ROOT = Path(__file__).resolve().parent.parent
SETTINGS = (
    "data.dir=anywhere", "data.num_workers=0", "device=cpu", "train.batch_size=4", "precision=fp32",
    "train.checkpoint_every=1", "train.epochs=100000", "train.early_stopping_patience=0", "train.report_every=50",
    "train.rank_timeout_s=60",
)  # fmt: skip
LIMIT_S = 120.0
"""Far above the time limit of the ranks: a process that is there after it hangs."""


def train_run(rank: int, size: int, port: int, words: list[str], shown: Path) -> None:
    """One rank of `torchrun -m halfstep train`, in a process that was forked for it."""
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    with (shown / str(rank)).open("wb") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    from halfstep_train.cli.main import main

    torch.set_num_threads(1)
    main(["train", *words])


def start_run(size: int, run: Path, new: list[str], *overrides: str) -> list[Any]:
    """Start the ranks of a run, which resume if there is a checkpoint; what they print goes to the folder `shown`."""
    words = ["--resume", str(run)] if find_saved_step(run) else [*new, "--out", str(run)]
    shown = run.parent / "shown"
    shown.mkdir(parents=True, exist_ok=True)
    given = (size, free_port(), [*words, *overrides], shown)
    processes = [FORKED.Process(target=train_run, args=(rank, *given)) for rank in range(size)]
    for process in processes:
        process.start()
    return processes


def find_saved_step(run: Path) -> int:
    """Return the step of the last checkpoint, 0 if there is none."""
    names = [path.name for path in (run / "checkpoints").glob("step-*")]
    return max((int(name.split("-")[1]) for name in names), default=0)


def wait_for_save(run: Path, before: int) -> None:
    until = time.monotonic() + LIMIT_S
    while find_saved_step(run) <= before and time.monotonic() < until:
        time.sleep(0.01)


def kill(processes: list[Any], victims: Sequence[int]) -> tuple[int, float]:
    """Kill some ranks; return how many of the others hang, and when all had ended."""
    for victim in victims:
        processes[victim].kill()
    killed_at, num_hangs = time.monotonic(), 0
    for process in processes:
        process.join(LIMIT_S)
        num_hangs += process.is_alive()
        process.kill()
        process.join()
    return num_hangs, round(time.monotonic() - killed_at, 2)


def kill_once(run: Path, draw: random.Random) -> dict[str, float | int]:
    """Kill a process of the run at some moment, and see what is left of it."""
    before, size = find_saved_step(run), draw.choice((2, 3))
    processes = start_run(size, run, ["rank_workload:build", *SETTINGS])
    wait_for_save(run, before)
    time.sleep(draw.uniform(0.0, 2.0))
    victim = draw.randrange(size)
    num_hangs, ended_s = kill(processes, [victim])
    shown = [(run.parent / "shown" / str(rank)).read_text() for rank in range(size)]
    return {
        "size": size, "victim": victim, "before": before, "after": find_saved_step(run), "ended_s": ended_s,
        "hangs": num_hangs, "told": sum(f"rank {victim} (process" in text for text in shown),
    }  # fmt: skip


def main() -> None:
    num, seed = (int(word) for word in [*sys.argv[1:], *("30", "0")[len(sys.argv) - 1 :]])
    draw, rounds = random.Random(seed), []
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(num):
            rounds.append(kill_once(Path(folder) / "run", draw))
            print(json.dumps(rounds[-1]), flush=True)
    lost = [r for r in rounds if r["after"] < r["before"] or r["after"] == 0]
    found = {
        "command": f"PYTHONPATH=tests/support python tests/soak_ranks.py {num} {seed}",
        "date": time.strftime("%Y-%m-%d"),
        "kills": num, "seed": seed, "lost": len(lost), "hangs": sum(int(r["hangs"]) for r in rounds),
        "not_told_once": sum(r["told"] != 1 for r in rounds),
        "slowest_end_s": max(float(r["ended_s"]) for r in rounds), "torch": torch.__version__,
        "machine": platform.machine(), "rounds": rounds,
    }  # fmt: skip
    (ROOT / "benchmarks" / "results" / "soak_ranks.json").write_text(json.dumps(found, indent=1) + "\n")
    sys.exit(1 if lost or found["hangs"] or found["not_told_once"] else 0)


if __name__ == "__main__":
    main()
