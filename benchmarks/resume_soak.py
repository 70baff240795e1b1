"""Kill custom loops at random moments: does a resumed loop end with the same bits?

    python benchmarks/resume_soak.py [--kills 25] [--loops classifier gan]

Six loops (tests/support/public_loops.py) save with hs.save after every step. Each is run once undisturbed. Then, for
each of 25 moments drawn from its running time, it is started, killed there with SIGKILL, and started again until it
ends. The checksum of all its weights must be that of the undisturbed run. `--workers` lets the loops that have a data
set load it in two workers.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))

import torch

from public_loops import IN_WORKERS, LOOPS, train
from recording import store

FORKED = multiprocessing.get_context("forkserver")
# The optimizers' first call would import the compiler, which takes longer than the loop.
FORKED.set_forkserver_preload(["torch._dynamo", "public_loops", "halfstep.own_loop.save_and_load"])


def write_checksum(loop: Callable[..., Any], path: Path, result: Path) -> None:
    multiprocessing.set_start_method("fork", force=True)  # of the loader's workers, as on Linux by default
    result.write_text(str(train(loop, path)))


def start(loop: Callable[..., Any], folder: Path) -> ForkServerProcess:
    started = FORKED.Process(target=write_checksum, args=(loop, folder / "state", folder / "result"))
    started.start()
    return started


def run_whole(loop: Callable[..., Any], folder: Path) -> tuple[str, float]:
    """Return the checksum of an undisturbed run, and its time from the first saved state on."""
    running = start(loop, folder)
    while not (folder / "state").exists() and running.is_alive():
        time.sleep(0.001)
    first = time.perf_counter()
    running.join()
    return (folder / "result").read_text(), time.perf_counter() - first


def kill_once(loop: Callable[..., Any], folder: Path, moment_s: float) -> tuple[str, bool]:
    """Return the checksum of a run that was killed so long after its first saved state, and whether it still ran."""
    running = start(loop, folder)
    while not (folder / "state").exists() and running.is_alive():
        time.sleep(0.001)
    time.sleep(moment_s)
    was_running = running.is_alive()
    running.kill()
    running.join()
    again = start(loop, folder)
    again.join()
    assert again.exitcode == 0, f"the resumed loop ended with {again.exitcode}"
    assert [path.name for path in folder.glob(".writing*")] == [], "unfinished files are left"
    return (folder / "result").read_text(), was_running


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kills", type=int, default=25)
    parser.add_argument("--loops", nargs="+", choices=sorted(LOOPS), default=list(LOOPS))
    parser.add_argument("--workers", action="store_true")
    options = parser.parse_args()
    found: dict[str, dict[str, Any]] = {}
    for name in options.loops:
        loop = IN_WORKERS[name] if options.workers else LOOPS[name]
        moments = random.Random(name)
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "whole").mkdir()
            expected, whole_s = run_whole(loop, Path(folder) / "whole")
            equal, killed = 0, 0
            for number in range(options.kills):
                own = Path(folder) / str(number)
                own.mkdir()
                checksum, was_running = kill_once(loop, own, moments.uniform(0, whole_s))
                equal, killed = equal + (checksum == expected), killed + was_running
        found[name] = {"runs": options.kills, "killed": killed, "bit_equal": equal, "whole_s": round(whole_s, 2)}
        print(name, found[name], flush=True)
    suffix = "_workers" if options.workers else ""
    store(f"resume_soak{suffix}", {"loops": found}, torch.device("cpu"))


if __name__ == "__main__":
    main()
