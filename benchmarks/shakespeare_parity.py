"""Does low precision cost a language model anything? Characters of Shakespeare in nanoGPT's setting, paired seeds.

    python benchmarks/shakespeare_parity.py --data DIR [--precisions fp32,bf16,fp16] [--seeds 5] [--at-once 15]

DIR holds input.txt (tiny Shakespeare: 1.1 M characters, 65 of them distinct). The setting is the preset `shakespeare`,
nanoGPT's "baby GPT": 6 blocks, 384 channels, context 256, batch 64, dropout 0.2, 5000 steps; its author reports a best
validation loss of 1.47. Validation every 250 steps, and the best loss counts, as there. Runs are eager
(`--set train.fast=graph` for another mode). The margin is 1 % of that loss's perplexity, fixed beforehand.
On a CPU add --simulate and small sizes: --set train.max_steps=20 --set model.depth=1.
"""

from __future__ import annotations

import math
import statistics
import tempfile
from pathlib import Path

from parity import compare, parity_flags

GOAL = 1.50
MARGIN = 0.01 * math.exp(1.47)
EVERY = 250


def main() -> None:
    parser = parity_flags(__doc__, name="shakespeare_parity")
    parser.set_defaults(margin=MARGIN)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        settings = {
            "preset": "shakespeare",
            "data.dir": arguments.data,
            "data.cache_file": str(Path(scratch) / "shakespeare.tokens"),
            "data.num_workers": 1,
            "train.fast": "off",
            "train.validate_every_steps": EVERY,
        }
        comparison = compare(arguments, "gpt2", settings, Path(scratch), best=True)
    for row in comparison.request.rows:
        losses = [math.log(run.value) for run in comparison.select_outcomes(row.name)]
        reached = "reached" if max(losses) <= GOAL else "missed"
        mean, worst = statistics.mean(losses), max(losses)
        print(f"{row.name}: best validation loss {mean:.4f}, worst {worst:.4f}, goal {GOAL} {reached}")


if __name__ == "__main__":
    main()
