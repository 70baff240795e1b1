"""GPT-2's demo: after a short run on a CPU the loss is near the text's own entropy, where no model of pairs comes.

    python demos/language.py [--out DIR] [KEY=VALUE ...]

Exit code 1 where it is not. About two minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from halfstep_train.report.metrics_file import read
from halfstep_train.run.train import train
from halfstep_train.workloads import load

DISTANCE = 0.08
"""Nats a character above the text's entropy that are allowed. Some of them are what windows cost: at the beginning of
each the model does not see the line it is in."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="the run's folder; default: a new one in the temporary files")
    parser.add_argument("words", nargs="*", help="settings of halfstep train")
    arguments = parser.parse_intermixed_args()
    start, out = time.perf_counter(), arguments.out or Path(tempfile.mkdtemp()) / "gpt2"
    run = train(load("gpt2", overrides=["device=cpu", "log.quiet=true", *arguments.words]), out=out)
    loss = [record["loss"] for record in read(run / "metrics.jsonl") if record["kind"] == "val"][-1]
    entropy = json.loads((run / "data" / "entropy.json").read_text())["nats_per_character"]["val"]
    pairs = loss_of_pairs(*((run / "data" / f"{part}.txt").read_text() for part in ("train", "val")))
    took = time.perf_counter() - start
    print(f"loss {loss:.4f}, entropy {entropy:.4f}, pairs of characters {pairs:.4f}; {took:.0f} s")
    is_near = entropy < loss + 0.02 and loss - entropy < DISTANCE < pairs - entropy
    print("near the entropy" if is_near else f"NOT within {DISTANCE} of the entropy")
    return 0 if is_near else 1


def loss_of_pairs(train_text: str, val_text: str) -> float:
    """What the best model that sees one character back would get, counted on the training part."""
    pairs, ones, kinds = Counter(zip(train_text, train_text[1:], strict=False)), Counter(train_text), set(train_text)
    chance = {pair: (count + 0.1) / (ones[pair[0]] + 0.1 * len(kinds)) for pair, count in pairs.items()}
    seen = list(zip(val_text, val_text[1:], strict=False))
    return -sum(math.log(chance.get(pair, 0.1 / (ones[pair[0]] + 0.1 * len(kinds)))) for pair in seen) / len(seen)


if __name__ == "__main__":
    sys.exit(main())
