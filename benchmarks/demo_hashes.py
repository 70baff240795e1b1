"""SHA-256 of the final weights of every training in demos/: a change that moves code keeps them all.

    python benchmarks/demo_hashes.py [--jobs 2] [--out DIR]     trains, compares with the stored hashes, stores them
    python benchmarks/demo_hashes.py --demos images language    only these

Each demo runs in one thread, so that sums have one order. The hashes hold for one machine and version of torch; exit
code 1 where one differs from the stored one of the same machine. About 25 minutes on two cores.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from recording import RESULTS, device_name, store

DEMOS = Path(__file__).resolve().parent.parent / "demos"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--demos", nargs="*", default=sorted(path.stem for path in DEMOS.glob("*.py")))
    parser.add_argument("--jobs", type=int, default=2, help="demos at the same time")
    parser.add_argument("--out", help="folder for the JSON, default benchmarks/results")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(arguments.jobs) as pool:
        found = dict(
            pair for pairs in pool.map(lambda demo: train(demo, Path(folder)), arguments.demos) for pair in pairs
        )
    before = stored()
    changed = sorted(name for name in found if before.get(name, found[name]) != found[name])
    print(f"{len(found)} trainings, {len(found.keys() & before.keys())} compared, changed: {changed or 'none'}")
    store("demo_hashes", {"sha256": before | found}, torch.device("cpu"), arguments.out)
    return 1 if changed else 0


def train(demo: str, folder: Path) -> list[tuple[str, str]]:
    """Run a demo; return its trainings with the hash of their last checkpoint's weights."""
    out = folder / demo
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, DEMOS / f"{demo}.py", "--out", out], env=environment, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        sys.exit(f"{demo} failed:\n{done.stdout[-2000:]}")
    runs = sorted(path.parent for path in out.rglob("checkpoints") if path.is_dir())
    print(f"{demo}: {len(runs)} trainings", flush=True)
    return [(f"{demo}/{run.name}", hash_of(run)) for run in runs]


def hash_of(run: Path) -> str:
    last = max(path for path in (run / "checkpoints").glob("step-*") if path.is_dir())
    found = hashlib.sha256()
    for file in sorted(last.glob("*.safetensors")):
        found.update(file.name.encode() + file.read_bytes())
    return found.hexdigest()


def stored() -> dict[str, str]:
    """Hashes of this machine and torch; of others none, which would differ by the order of sums."""
    path = RESULTS / "demo_hashes.json"
    record = json.loads(path.read_text()) if path.exists() else {}
    is_ours = (record.get("device"), record.get("torch")) == (device_name(torch.device("cpu")), torch.__version__)
    return record["sha256"] if is_ours else {}


if __name__ == "__main__":
    sys.exit(main())
