"""`make soak`: ranks of a sharded loop and of a sharded run, which save at every step, are killed at random moments.

    PYTHONPATH=tests/support python tests/soak_shards.py [NUM_KILLS] [SEED] [NUM_KILLS_OF_A_RUN]

Each round continues from the last complete save with two ranks, and kills one of them or both: while they start, train
or write a save. At the end, a loop without kills trains as many steps: every step of every round must have left its
bits on every rank. The run trains a few steps more: its last checkpoint must be that of a run without kills. The result
goes to benchmarks/results/soak_shards.json.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import random
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

import soak_ranks
from ranks_together import free_port
from soak_ranks import kill
from warm_processes import FORKED

ROOT = Path(__file__).resolve().parent.parent
SIZE = 2
TIMEOUT_S = 30.0
WAITING_S = 120.0  # for the first step of a round


def train(rank: int, port: int, path: Path, log: Path, num_steps: int) -> None:
    """One rank: train `num_steps` steps from the last save, save after each, and log a digest of the weights."""
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.fsdp import fully_shard

    import halfstep as hs

    with (log.parent / f"shown-{rank}").open("wb") as shown:
        os.dup2(shown.fileno(), 2)
    torch.set_num_threads(1)
    limit = timedelta(seconds=TIMEOUT_S)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=SIZE, timeout=limit)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 1023), nn.Tanh(), nn.Dropout(0.1), nn.Linear(1023, 256))
    fully_shard(model[0])
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    step = hs.Step(model, optimizer, "fp32", clip_norm=1.0, ema_decay=0.99, fast="off")
    if path.exists():
        hs.load(path, step, model)
    rows = torch.randn(64, 256, generator=torch.Generator().manual_seed(1))[rank::SIZE]
    generator = torch.Generator().manual_seed(rank)
    loader = torch.utils.data.DataLoader(rows, batch_size=4, shuffle=True, generator=generator)  # type: ignore[arg-type]
    with (log.parent / f"steps-{rank}").open("a") as lines:
        while step.attempted < num_steps:
            for window in step.windows(loader):
                step(lambda x: (model(x) - x).square().mean(), window)
                lines.write(json.dumps([rank, step.attempted, _digest(model, step)]) + "\n")
                lines.flush()
                hs.save(path, step, model)
                if step.attempted == num_steps:
                    break
    step.finish()
    dist.destroy_process_group()


RUN_SETTINGS = (
    "data.dir=anywhere", "data.num_workers=0", "device=cpu", "train.batch_size=4", "precision=fp32",
    "train.checkpoint_every=1", "train.epochs=100000", "train.rank_timeout_s=30", "train.shard=true",
    "ema.enabled=true", "schedule.name=constant", "schedule.warmup_steps=0",
)  # fmt: skip


def kill_run_once(run: Path, draw: random.Random) -> dict[str, Any]:
    before = soak_ranks.find_saved_step(run)
    processes = start_run(run, 1_000_000)
    soak_ranks.wait_for_save(run, before)
    time.sleep(draw.uniform(0.0, 1.0))
    victims = draw.choice(([0], [1], [0, 1]))
    num_hangs, ended_s = kill(processes, victims)
    is_in_save = any((run / "checkpoints").glob(".writing-*"))
    return {
        "victims": victims, "before": before, "after": soak_ranks.find_saved_step(run), "in_a_save": is_in_save,
        "hangs": num_hangs, "ended_s": ended_s,
    }  # fmt: skip


def start_run(run: Path, num_steps: int) -> list[Any]:
    return soak_ranks.start_run(SIZE, run, ["sharded_workload:build", *RUN_SETTINGS], f"train.max_steps={num_steps}")


def compare_runs(folder: Path) -> bool:
    """Train the killed run a few steps more, and one without kills as far; True if their last checkpoints are equal."""
    from whole_runs import final_state

    num_steps = soak_ranks.find_saved_step(folder / "killed" / "run") + 3
    for name in ("killed", "whole"):
        for process in start_run(folder / name / "run", num_steps):
            process.join()
    (left, _), (right, _) = (final_state(folder / name / "run") for name in ("killed", "whole"))
    return left.keys() == right.keys() and all(torch.equal(value, right[name]) for name, value in left.items())


def _digest(model: Any, step: Any) -> str:
    tensors = [*model.state_dict().values(), *step.ema.state_dict().values()]
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(getattr(tensor, "_local_tensor", tensor).detach().numpy().tobytes())
    return digest.hexdigest()[:16]


def start(folder: Path, num_steps: int) -> list[Any]:
    folder.mkdir(exist_ok=True)
    port = free_port()
    given = (port, folder / "last", folder / "log", num_steps)
    processes = [FORKED.Process(target=train, args=(rank, *given)) for rank in range(SIZE)]
    for process in processes:
        process.start()
    return processes


def read_steps(folder: Path) -> list[tuple[int, int, str]]:
    lines = [line for rank in range(SIZE) if (file := folder / f"steps-{rank}").exists() for line in file.open()]
    return [tuple(json.loads(line)) for line in lines if line.endswith("]\n")]


def find_saved_step(folder: Path) -> int:
    from halfstep.distributed.sharded_files import find_latest

    return int(find_latest(folder / "last").name.split("-")[1]) if (folder / "last").exists() else 0


def kill_once(folder: Path, draw: random.Random) -> dict[str, Any]:
    before, num_before, then = find_saved_step(folder), len(read_steps(folder)), set((folder / "last").glob("step-*"))
    processes = start(folder, 1_000_000)
    moment = draw.choice(("starting", "training", "training", "training"))
    if moment == "training":
        until = time.monotonic() + WAITING_S
        while len(read_steps(folder)) == num_before and time.monotonic() < until:
            time.sleep(0.01)
        time.sleep(draw.uniform(0.0, 1.5))
    else:
        time.sleep(draw.uniform(0.0, 6.0))
    victims = draw.choice(([0], [1], [0, 1]))
    num_hangs, ended_s = kill(processes, victims)
    new = set((folder / "last").glob("step-*")) - then
    is_unfinished = any(int(path.name.split("-")[1]) > find_saved_step(folder) for path in new)
    return {
        "moment": moment, "victims": victims, "before": before, "after": find_saved_step(folder),
        "steps": len(read_steps(folder)) - num_before, "in_a_save": is_unfinished, "hangs": num_hangs,
        "ended_s": ended_s,
    }  # fmt: skip


def main() -> None:
    num, seed, num_of_run = (int(word) for word in [*sys.argv[1:], *("25", "0", "10")[len(sys.argv) - 1 :]])
    draw, rounds, run_rounds = random.Random(seed), list[dict[str, Any]](), list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as name:
        folder, reference = Path(name) / "killed", Path(name) / "reference"
        for _ in range(num):
            rounds.append(kill_once(folder, draw))
            print(json.dumps(rounds[-1]), flush=True)
        steps = read_steps(folder)
        for process in start(reference, max(step for _, step, _ in steps)):
            process.join()
        expected = {(rank, step): digest for rank, step, digest in read_steps(reference)}
        for _ in range(num_of_run):
            run_rounds.append(kill_run_once(Path(name) / "runs" / "killed" / "run", draw))
            print(json.dumps(run_rounds[-1]), flush=True)
        is_run_equal = compare_runs(Path(name) / "runs")
    differing = sum(expected.get((rank, step)) != digest for rank, step, digest in steps)
    found: dict[str, Any] = {
        "command": f"PYTHONPATH=tests/support python tests/soak_shards.py {num} {seed} {num_of_run}",
        "date": time.strftime("%Y-%m-%d"), "kills": num, "seed": seed, "ranks": SIZE,
        "kills_in_a_save": sum(r["in_a_save"] for r in rounds), "steps_compared": len(steps), "differing": differing,
        "lost_saves": sum(r["after"] < r["before"] for r in rounds), "hangs": sum(r["hangs"] for r in rounds),
        "slowest_end_s": max(r["ended_s"] for r in rounds), "torch": torch.__version__,
        "machine": platform.machine(), "rounds": rounds,
    }  # fmt: skip
    found["run"] = {
        "kills": num_of_run, "kills_in_a_save": sum(r["in_a_save"] for r in run_rounds), "is_equal": is_run_equal,
        "lost_checkpoints": sum(r["after"] < r["before"] for r in run_rounds),
        "hangs": sum(r["hangs"] for r in run_rounds), "slowest_end_s": max(r["ended_s"] for r in run_rounds),
        "rounds": run_rounds,
    }  # fmt: skip
    (ROOT / "benchmarks" / "results" / "soak_shards.json").write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps({key: value for key, value in found.items() if key != "rounds"}))
    has_failed = differing or found["lost_saves"] or found["hangs"] or not steps
    run = found["run"]
    sys.exit(1 if has_failed or run["lost_checkpoints"] or run["hangs"] or not run["is_equal"] else 0)


if __name__ == "__main__":
    main()
