"""Where a run's folder is and how long it may take: flags of `halfstep train` that other projects have, too."""

from __future__ import annotations

import os
import re
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import typer

from halfstep.errors import ConfigError

DURATION = re.compile(r"(?:(?:(\d+):)?(\d+):)?(\d+):(\d+)")


def resumed_folder(resume: Path | None, continue_from: Path | None) -> Path | None:
    """--resume, or --continue, which means the same."""
    if resume and continue_from and resume != continue_from:
        raise ConfigError(f"--resume {resume} and --continue {continue_from} are two runs", fix="name one")
    found = resume or continue_from
    if found is not None and found.suffix == ".ckpt":
        raise ConfigError(
            f"{found} is a checkpoint of Lightning",
            why="its optimizer and data position mean nothing to halfstep",
            fix=f"start a new run from its weights: model.weights={found}",
        )
    return found


@contextmanager
def new_folder(out: Path | None, log_dir: Path | None, *, dry: bool, name: str) -> Iterator[Path | None]:
    """Where a new run goes; None: its usual place. A dry one is gone afterwards."""
    if sum(map(bool, (out, log_dir, dry))) > 1:
        raise ConfigError("--out, --log-dir and --dry each say where the run goes", fix="keep one of them")
    if dry:
        with tempfile.TemporaryDirectory(prefix="halfstep-dry-") as place:
            typer.echo(f"--dry: the run is in {place} while it lasts, then removed", err=True)
            yield Path(place) / name
    else:
        yield log_dir / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}" if log_dir else out


@contextmanager
def stopped_after(timeout: str | None) -> Iterator[None]:
    """After so long the run is told what a scheduler would tell it: finish the step, save, end."""
    if timeout is None:
        yield
        return
    timer = threading.Timer(seconds_of(timeout), _stop, (timeout,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _stop(timeout: str) -> None:
    typer.echo(f"--timeout {timeout} is over", err=True)
    os.kill(os.getpid(), signal.SIGTERM)


def seconds_of(text: str) -> int:
    """DD:HH:MM:SS, of which days and hours may be missing."""
    found = DURATION.fullmatch(text)
    if found is None:
        raise ConfigError(f"--timeout {text} is not a duration", fix="DD:HH:MM:SS, such as 00:11:30:00")
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    total = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    if total == 0:
        raise ConfigError(f"--timeout {text} is zero", fix="DD:HH:MM:SS, such as 00:11:30:00")
    return total
