"""`hs.train`: train a workload from Python, as `halfstep train` does from the command line."""

from __future__ import annotations

import os
from pathlib import Path

from halfstep.config.load import Loaded
from halfstep.distributed.launch import read_launch
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

    Example::

        hs.train("unet", "data.dir=data/carvana", "precision=bf16", out="runs/first")
    """
    loaded = load(target, overrides=overrides) if isinstance(target, str) else target
    return train_loaded(
        loaded,
        out=None if out is None else Path(out),
        resume=None if resume is None else Path(resume),
        allow_changes=allow_changes,
        launch=read_launch(os.environ),
    )
