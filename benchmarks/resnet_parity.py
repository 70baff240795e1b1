"""Does low precision cost accuracy? ResNet-50 on a small folder of real pictures, paired seeds, by `halfstep train`.

    python benchmarks/resnet_parity.py --data DIR [--precisions fp32,bf16,fp16] [--seeds 5] [--epochs 20] [--out DIR]

DIR is an image folder with train/ and val/ (a part of Imagenette: 1,000 and 250 pictures of ten classes). With so few
the accuracy itself means nothing; only the differences between precisions do. The preset is `quick`; pictures are
packed once for all runs. On a CPU add --simulate and small sizes, such as --workload resnet18 --size 32
--set model.width=8 --set 'model.blocks=[1, 1]'.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from parity import compare, parity_flags


def main() -> None:
    parser = parity_flags(__doc__, name="resnet_parity")
    parser.add_argument("--workload", default="resnet50")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--size", type=int, default=128)
    parser.add_argument("--workers", type=int, default=4)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        settings = {
            "preset": "quick",
            "data.dir": arguments.data,
            "data.cache_file": str(Path(scratch) / "pictures.pack"),
            "data.image_size": arguments.size,
            "data.num_workers": arguments.workers,
            "train.batch_size": arguments.batch,
            "train.epochs": arguments.epochs,
        }
        compare(arguments, arguments.workload, settings, Path(scratch))


if __name__ == "__main__":
    main()
