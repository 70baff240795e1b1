"""Where a run goes, on how many GPUs and for how long: flags of `halfstep train` that say nothing of its config."""

from __future__ import annotations

import logging
import os
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from pathlib import Path

import typer

from halfstep.disk import DRY_PREFIX
from halfstep.errors import ConfigError, RankLost

DURATION = re.compile(r"(?:(?:(\d+):)?(\d+):)?(\d+):(\d+)")
SAVING_S = 600
"""How long processes may take to finish their step and save after Ctrl-C; torchrun itself gives them 30 s."""


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
        with tempfile.TemporaryDirectory(prefix=DRY_PREFIX) as place:
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


def devices_of(gpus: str) -> tuple[int, str]:
    """How many processes, and what CUDA_VISIBLE_DEVICES says then: `2` is a count, `1,2` are devices (`3,` is one)."""
    if gpus.isdecimal() and int(gpus) > 0:
        return int(gpus), ""
    names = [name.strip() for name in gpus.split(",") if name.strip()]
    if "," in gpus and names and all(name.isdecimal() for name in names) and len(set(names)) == len(names):
        return len(names), ",".join(names)
    raise ConfigError(f"--gpus {gpus}", why="it is neither a count nor a list of GPUs", fix="--gpus 2, or --gpus 0,1")


def start_on(gpus: str, device: str, variables: MutableMapping[str, str]) -> None:
    """Start this command once for each GPU, wait for all of them, and exit as they did. With one it goes on here."""
    num, visible = devices_of(gpus)
    if "RANK" in variables or "SLURM_STEP_NUM_TASKS" in variables:
        raise ConfigError(
            f"--gpus {gpus} inside a process that a launcher started",
            why="torchrun and srun have decided how many processes there are",
            fix="leave --gpus out, or start the command alone",
        )
    if device.startswith("cuda:"):
        raise ConfigError(f"--gpus {gpus} and device {device}", fix="keep one of them")
    if visible:
        variables["CUDA_VISIBLE_DEVICES"] = visible
    if device != "cpu":
        refuse_missing(num)
    if num > 1:
        sys.exit(launched(num, without_gpus(sys.argv[1:])))


def refuse_missing(num: int) -> None:
    import torch

    if torch.cuda.device_count() < num:
        raise ConfigError(
            f"--gpus asks for {num}, torch finds {torch.cuda.device_count()}",
            fix="fewer, or --device cpu for processes that train without GPUs",
        )


def without_gpus(words: list[str]) -> list[str]:
    """The command line that each process gets."""
    kept, skips = [], False
    for word in words:
        if skips or word.startswith("--gpus"):
            skips = not skips and word == "--gpus"
            continue
        kept.append(word)
    return kept


def launched(num: int, words: list[str]) -> int:
    """The exit status of `num` processes of this command; an error was shown by the one that met it."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // num)))
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(SAVING_S))
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=num, run_id="halfstep", rdzv_backend="c10d",
        rdzv_endpoint="localhost:0", max_restarts=0, monitor_interval=0.1,
    )  # fmt: skip
    logging.disable(logging.ERROR)  # torchrun's lines on top of what the processes say themselves
    try:
        elastic_launch(config, sys.executable)("-m", "halfstep", *words)
    except ChildFailedError as error:
        codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
        if not any(code > 0 for code in codes.values()):
            raise all_killed(codes) from None
        return next(code for code in codes.values() if code > 0)
    except SignalException as asked:  # it was passed on: the processes have saved and said so
        return 128 + asked.sigval
    return 0


def all_killed(codes: Mapping[int, int]) -> RankLost:
    """By signals, so that none of them could say a word."""
    names = {rank: signal.Signals(-code).name for rank, code in sorted(codes.items())}
    return RankLost(
        "; ".join(f"rank {rank} was ended by {name}" for rank, name in names.items()),
        why="killed by hand, by a scheduler, or out of host memory",
        fix="go on from the last checkpoint with --resume RUN",
    )
