"""SlotContrast's demo with several seeds, each with clips of its own: slots against k-means.

    python benchmarks/slots_demo_seeds.py [--seeds 5] [--at-once 1] [--out DIR] [KEY=VALUE ...]

Every seed runs demos/slotcontrast.py on one core. Stored are FG-ARI of slots, of untrained slots and of k-means (on
features and pixels, with and without coordinates), and how many seconds of CPU time a run took.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from recording import store

DEMO = Path(__file__).parent.parent / "demos" / "slotcontrast.py"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--at-once", type=int, default=1, help="runs side by side")
    parser.add_argument("--out", help="folder for the JSON, default benchmarks/results")
    parser.add_argument("words", nargs="*", help="settings of halfstep train")
    arguments = parser.parse_intermixed_args()
    with ThreadPoolExecutor(arguments.at_once) as pool:
        rows = list(pool.map(lambda seed: one_seed(seed, arguments.words), range(arguments.seeds)))
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    best = [max(row["k_means"].values()) for row in rows]
    results = {
        "slots_mean": statistics.mean(row["slots"] for row in rows),
        "best_k_means_mean": statistics.mean(best),
        "seeds_won": sum(row["slots"] > other for row, other in zip(rows, best, strict=True)),
        "cpu_s_per_run": (used.ru_utime + used.ru_stime) / len(rows),
        "rows": rows,
    }
    print(json.dumps(results, indent=2))
    store("slots_demo_seeds", results, torch.device("cpu"), arguments.out)


def one_seed(seed: int, words: list[str]) -> dict[str, Any]:
    """A seed that k-means beats is a row, too: the demo's own exit says nothing here."""
    with tempfile.TemporaryDirectory() as scratch:
        found = Path(scratch) / "scores.json"
        command = [sys.executable, str(DEMO), "--out", f"{scratch}/run", "--json", str(found)]
        command += ["device=cpu", "log.quiet=true", f"train.seed={seed}", *words]
        ended = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
        if not found.exists():
            raise SystemExit(f"seed {seed}: {ended.stderr[-2000:]}")
        return {"seed": seed, **json.loads(found.read_text())}


if __name__ == "__main__":
    main()
