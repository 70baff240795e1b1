"""Trained runs of a second each, on demo data, for what reads runs."""

from __future__ import annotations

import io
import json
import shutil
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from halfstep_train.report.run_report import Bar, RunReport
from halfstep_train.run.train import train
from halfstep_train.workloads import load

UNET: dict[str, object] = {
    "data.image_size": 32,
    "model.base_channels": 4,
    "model.depth": 2,
    "train.max_steps": 6,
    "train.checkpoint_every": 2,
    "ema.enabled": True,
}
RESNET: dict[str, object] = {"train.max_steps": 4, "data.image_size": 32}
ALWAYS: dict[str, object] = {"device": "cpu", "precision.default": "fp32", "data.num_workers": 0, "log.quiet": True}


def unet_run(out: Path, more: Mapping[str, object] | None = None) -> Path:
    """Checkpoints of steps 2, 4 and 6, with averaged weights."""
    return _run("unet", out, {**UNET, **(more or {})})


def resnet_run(out: Path, more: Mapping[str, object] | None = None) -> Path:
    """One checkpoint, ten classes."""
    return _run("resnet18", out, {**RESNET, **(more or {})})


def _run(workload: str, out: Path, values: Mapping[str, object]) -> Path:
    overrides = [f"{key}={json.dumps(value)}" for key, value in {**ALWAYS, **values}.items()]
    return train(load(workload, overrides=overrides), out=out)


def copied(run: Path, to: Path) -> Path:
    """A run that a test may damage; its config still names the data folder of the original."""
    return Path(shutil.copytree(run, to, ignore=shutil.ignore_patterns("data", "report")))


@contextmanager
def press_ctrl_c(*, after: int) -> Iterator[None]:
    """Send this process SIGINT when the progress bar has counted so many."""
    advance = Bar.advance

    def advance_and_press(self: Bar, *args: Any, **options: Any) -> None:
        advance(self, *args, **options)
        if self.done == after:
            signal.raise_signal(signal.SIGINT)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Bar, "advance", advance_and_press)
        yield


class Told:
    """A report whose words can be read."""

    def __init__(self, folder: Path) -> None:
        self._file = io.StringIO()
        self.report = RunReport(folder, console=Console(file=self._file, width=500))

    @property
    def text(self) -> str:
        return self._file.getvalue()
