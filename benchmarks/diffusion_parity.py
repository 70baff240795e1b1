"""Does low precision cost quality? Pixel diffusion at 32×32 on a folder of pictures, paired seeds, by `halfstep train`.

    python benchmarks/diffusion_parity.py --data DIR [--precisions fp32,bf16,fp16] [--seeds 5] [--epochs 40] [--out DIR]

DIR holds pictures, divided or not (a part of Imagenette: 1,000 and 250). Judged is the held-out squared
error of the averaged weights, with the same noise for every run: the margin is max(1 % of fp32's mean, twice its
deviation between seeds). On a CPU add --simulate and small sizes, such as --epochs 2 --set 'model.channels=[16, 32]'.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from parity import compare, parity_flags


def main() -> None:
    parser = parity_flags(__doc__, name="diffusion_parity")
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--batch", type=int, default=50)
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--workers", type=int, default=4)
    arguments = parser.parse_args()
    settings = {
        "data.dir": arguments.data,
        "data.image_size": arguments.size,
        "data.num_workers": arguments.workers,
        "model.channels": [64, 128, 128],
        "model.attention": [1],
        "optimizer.lr": 2e-4,
        "schedule.warmup_steps": 50,
        "ema.decay": 0.99,
        "train.batch_size": arguments.batch,
        "train.epochs": arguments.epochs,
    }
    with tempfile.TemporaryDirectory() as scratch:
        compare(arguments, "diffusion", settings, Path(scratch))


if __name__ == "__main__":
    main()
