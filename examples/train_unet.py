"""Train a U-Net from a Python script: the settings are a dict, and `use_amp` turns mixed precision on.

    python examples/train_unet.py [DATA_DIR]

DATA_DIR contains `imgs/` and `masks/`, or another layout of docs/data.md; without it, generated images are used.
"""

from __future__ import annotations

import sys

from halfstep.errors import HalfstepError
from halfstep_train.run.train import train
from halfstep_train.workloads import from_dict

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
    print(f"run folder: {run}")


if __name__ == "__main__":
    try:
        main()
    except HalfstepError as error:  # its message says what is wrong, why, and how to fix it: no traceback needed
        sys.exit(f"error: {error}")
