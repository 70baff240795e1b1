"""`halfstep.train`, the function, and `python -m halfstep.train`, the command."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from halfstep.config.load import Loaded
from halfstep.distributed.launch import launch_of
from halfstep.run.train import train as train_loaded
from halfstep.workloads import load


def train(
    target: str | Loaded,
    *overrides: str,
    out: Path | str | None = None,
    resume: Path | str | None = None,
    allow_changes: bool = False,
) -> Path:
    """Train a workload, a YAML file or a loaded config, and return the run's folder.

    hs.train("unet", "data.dir=data/carvana", "precision=bf16", out="runs/first")
    """
    loaded = load(target, overrides=overrides) if isinstance(target, str) else target
    places = [Path(place) if place is not None else None for place in (out, resume)]
    launch = launch_of(os.environ)
    return train_loaded(loaded, out=places[0], resume=places[1], allow_changes=allow_changes, launch=launch)


if __name__ == "__main__":
    from halfstep.cli.main import main

    main(["train", *sys.argv[1:]])
