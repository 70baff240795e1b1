"""Does low precision cost accuracy? U-Net on real electron-microscopy slices, paired seeds, by `halfstep train`.

    python benchmarks/unet_parity.py --data DIR [--precisions fp32,bf16,fp16] [--seeds 5] [--steps 150] [--out DIR]

DIR holds `image/` and `label/` (ISBI 2012: 30 slices of 512x512). The last six slices are held out, not random ones:
neighbouring slices of one volume are nearly the same picture. On a CPU add --simulate and small sizes.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from parity import compare, parity_flags

HELD_OUT = 6


def validation_list(data: Path, folder: Path) -> Path:
    names = sorted(
        (path.name for path in (data / "image").iterdir()), key=lambda n: int("".join(filter(str.isdigit, n)))
    )
    path = folder / "held_out.txt"
    path.write_text("\n".join(names[-HELD_OUT:]) + "\n")
    return path


def main() -> None:
    parser = parity_flags(__doc__, name="unet_parity")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--size", type=int, default=512)
    parser.add_argument("--width", type=int, default=64)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        settings = {
            "data.dir": arguments.data,
            "data.val_list": str(validation_list(Path(arguments.data), Path(scratch))),
            "data.image_size": arguments.size,
            "data.num_workers": 0,
            "model.base_channels": arguments.width,
            "train.batch_size": arguments.batch,
            "train.max_steps": arguments.steps,
            "train.epochs": 10_000,
        }
        compare(arguments, "unet", settings, Path(scratch))


if __name__ == "__main__":
    main()
