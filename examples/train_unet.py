"""Train a U-Net from a plain script: settings in a dict at the top, one line turns mixed precision on.

    python examples/train_unet.py [DATA_DIR]

DATA_DIR holds `imgs/` and `masks/` (or `image/` and `label/`); without it generated demo data are used.
"""

from __future__ import annotations

import sys

from halfstep.errors import HalfstepError
from halfstep.run.train import train
from halfstep.workloads import from_dict

CONFIG = {
    # Mixed precision
    "use_amp": False,  # True: mixed precision
    "amp_dtype": "bfloat16",  # 'bfloat16' or 'float16'
    "compile_model": False,
    # Training
    "batch_size": 8,
    "num_epochs": 10,
    "learning_rate": 5e-3,
    "early_stopping_patience": 20,
}


def main() -> None:
    data = {"data_dir": sys.argv[1]} if len(sys.argv) > 1 else {}
    run = train(from_dict("unet", {**CONFIG, **data}))
    print(f"everything about this run: {run}")


if __name__ == "__main__":
    try:
        main()
    except HalfstepError as error:  # what, why and how to fix it, without a traceback
        sys.exit(f"error: {error}")
