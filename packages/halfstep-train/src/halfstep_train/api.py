"""`hs.train`: train a workload from Python, as `halfstep train` does from the command line."""

from __future__ import annotations

import os
from pathlib import Path

from halfstep_train.cli.train import load_config
from halfstep_train.config.load import Loaded
from halfstep_train.run.launch import read_launch, read_launcher
from halfstep_train.run.train import train as train_loaded


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
        hs.train("unet", "train.epochs=40", resume="runs/first")

    A resumed run keeps its stored settings, except for those of a file and the overrides.
    """
    resumed = None if resume is None else Path(resume)
    launcher = read_launcher(os.environ)
    loaded = load_config([target, *overrides], {}, resumed, launcher=launcher) if isinstance(target, str) else target
    return train_loaded(
        loaded,
        out=None if out is None else Path(out),
        resume=resumed,
        allow_changes=allow_changes,
        launch=read_launch(os.environ),
    )
