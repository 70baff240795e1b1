"""`halfstep train`: load the config, choose the run's folder, start ranks on several GPUs, and train."""

from __future__ import annotations

import json
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
from typing import TYPE_CHECKING, Annotated, Any

import typer

from halfstep.disk import DRY_PREFIX
from halfstep.errors import ConfigError, RankLost, format_count
from halfstep_train.cli.completion import complete_run
from halfstep_train.cli.options import (
    DATA,
    FLAGS,
    RUN,
    SHOW,
    MaybeArguments,
    add_flags,
    option,
)

if TYPE_CHECKING:
    from halfstep_train.config.load import Loaded
    from halfstep_train.config.statements import Launcher


OVERRIDES = "YAML file whose values replace those of the config."
VALIDATION = "Print how validation counts its samples."


@add_flags(*FLAGS)
def command(
    arguments: MaybeArguments = None,
    overrides_file: Annotated[Path | None, option(OVERRIDES, "--config-overrides-file", panel=DATA)] = None,
    check_validation: Annotated[bool, option(VALIDATION, "--check-validation", panel=DATA)] = False,
    gpus: Annotated[str | None, option("How many GPUs (8), or which (0,1): one process each.", panel=RUN)] = None,
    out: Annotated[Path | None, option("The run's folder.", panel=RUN, show_default="runs/WORKLOAD-TIME")] = None,
    resume: Annotated[
        Path | None,
        option("Continue the run in this folder.", "--resume", "--continue", panel=RUN, autocompletion=complete_run),
    ] = None,
    allow_changes: Annotated[
        bool, option("With --resume: accept changed settings.", "--allow-changes", panel=RUN)
    ] = False,
    dry: Annotated[bool, option("Train, then delete the run's folder.", "--dry", "-n", panel=RUN)] = False,
    log_dir: Annotated[Path | None, option("Parent folder of the run's folder.", panel=RUN)] = None,
    timeout: Annotated[str | None, option("Save and stop after DD:HH:MM:SS.", panel=RUN)] = None,
    show_config: Annotated[
        bool, option("Show every setting with its value and source.", "--show-config", panel=SHOW)
    ] = False,
    as_json: Annotated[bool, option("With --show-config: print JSON.", "--json", panel=SHOW)] = False,
    **settings: Any,
) -> None:
    """Train a workload, or what a config file describes.

    Workloads: unet, resnet18, resnet34, resnet50, resnet101, resnet152, vit_s_16, vit_b_16, vit_l_16, vae, diffusion,
    radiodiff_vae, radiodiff, slotcontrast, steve, slotcontrast_steve, gpt2, gpt2_medium, gpt2_large, gpt2_xl, or a
    custom one by import path (my_pkg.my_mod:build). Without --data-dir they train on generated demo data.

    Flags override KEY=VALUE arguments, which override the file, which overrides the preset. Flags accept - and _.

    Example:

        halfstep train unet --data-dir data/carvana --bf16 --epochs 20 optimizer.lr=3e-4

        halfstep train resnet50 --data-dir data/photos train.fast=graph

        halfstep train unet --data-dir data/carvana train.memory=low

        halfstep train --resume runs/unet-20250101-120000 --epochs 40
    """
    from halfstep_train.run.launch import read_launch, read_launcher

    refuse_lightning_checkpoint(resume)
    launcher = read_launcher(os.environ, 1 if gpus is None else parse_gpus(gpus)[0])
    loaded = load_config(arguments or [], settings, resume, overrides_file, launcher)
    if resume and out:
        raise ConfigError(f"--resume {resume} continues in its own folder, not in --out {out}", fix="leave --out out")
    if as_json and not show_config:
        raise ConfigError(
            "--json needs --show-config", fix="leave --json out; a run writes its metrics as JSON to metrics.jsonl"
        )
    if check_validation:
        typer.echo("validation reads each sample once, in index order", err=True)
    launch = read_launch(os.environ)
    if show_config:
        if launch is None or launch.rank == 0:
            print_config(loaded, as_json=as_json)
        return
    new_folder = choose_new_folder(out, log_dir, dry=dry and not resume, name=loaded.config.workload)
    with new_folder as folder, stop_after(timeout):
        if resume is None:
            from halfstep_train.run.folder import refuse_missing_paths, refuse_used_folder

            refuse_missing_paths(loaded.config)
            # One of several ranks may find the folder that another one has just made, or that a restart continues.
            if folder is not None and launch is None:
                refuse_used_folder(folder)
        if gpus is not None:
            start_on_gpus(gpus, settings["device"] or loaded.config.device, os.environ)
        from halfstep_train.run.train import train

        train(loaded, out=folder, resume=resume, allow_changes=allow_changes, launch=launch)


def load_config(
    arguments: list[str],
    flags: dict[str, object],
    resume: Path | None,
    overrides_file: Path | None = None,
    launcher: Launcher | None = None,
) -> Loaded:
    """Load the config of a new or resumed run; the first argument is the workload or the file.

    With --resume the run's stored config is loaded. Settings of a file that is named as well apply on top of it.
    """
    from halfstep_train.config.load import is_file
    from halfstep_train.workloads import KINDS, load

    target, overrides = (arguments[0], arguments[1:]) if arguments and "=" not in arguments[0] else ("", arguments)
    given: dict[str, Any] = {"flags": flags, "overrides": overrides, "overrides_file": overrides_file}
    if resume:
        if is_file(target, KINDS):  # what the file sets becomes overrides of the stored config
            asked = load(target, launcher=launcher, **given)
            target, given = asked.config.workload, {"overrides": list_overrides(asked)}
        from halfstep_train.run.folder import RunFolder

        folder = RunFolder.open(str(resume))
        from halfstep_train.run.folder import apply_decided

        stored = load(str(folder.config))
        # Naming the workload again is allowed, another one is not.
        if target and target != (workload := stored.config.workload):
            raise ConfigError(f"--resume {resume} is a {workload} run, not {target}", fix=f"leave {target} out")
        # Loaded twice: with and without the changes, to find out which settings the user asks for.
        again = load(str(folder.config), launcher=launcher, **given)
        return apply_decided(again, stored, folder.read_settled().decided)
    if not target:
        raise ConfigError(
            "nothing to train", fix="give a workload or a file first: halfstep train unet, halfstep train my.yaml"
        )
    return load(target, launcher=launcher, **given)


def list_overrides(loaded: Loaded) -> list[str]:
    """Return every setting that is not a default as a KEY=VALUE override."""
    from halfstep_train.config.aliases import PER_RANK_KEYS
    from halfstep_train.report.config_view import list_settings

    found: dict[str, Any] = {
        path: value
        for path, value, origin, _ in list_settings(loaded)
        if origin.layer not in ("default", "launcher") and path != "workload"
    }
    for path in loaded.per_rank:  # another number of ranks gives another total
        key = next(key for key, total in PER_RANK_KEYS.items() if total == path)
        found[key] = found.pop(path) // loaded.num_ranks
    return [f"{path}={json.dumps(value)}" for path, value in found.items()]


def print_config(loaded: Loaded, *, as_json: bool) -> None:
    """Print every setting with its value and source, without training."""
    from halfstep_train.report.config_view import dump_config, show_config
    from halfstep_train.report.console import open_result_console

    if as_json:
        typer.echo(json.dumps(dump_config(loaded), indent=2))
    else:
        show_config(loaded, open_result_console(160))


DURATION = re.compile(r"(?:(?:(\d+):)?(\d+):)?(\d+):(\d+)")
SAVING_S = 600
"""Seconds that ranks have to finish their step and save after Ctrl-C; torchrun's default is 30."""


def refuse_lightning_checkpoint(resume: Path | None) -> None:
    if resume is not None and resume.suffix == ".ckpt":
        raise ConfigError(
            f"{resume} is a Lightning checkpoint",
            why="halfstep cannot restore its optimizer state and data position",
            fix=f"start a new run from its weights: model.weights={resume}",
        )


@contextmanager
def choose_new_folder(out: Path | None, log_dir: Path | None, *, dry: bool, name: str) -> Iterator[Path | None]:
    """Yield the folder of a new run, None for the default; remove the folder of a dry run afterwards."""
    if sum(map(bool, (out, log_dir, dry))) > 1:
        raise ConfigError("--out, --log-dir and --dry each choose the run's folder", fix="keep one of them")
    if dry:
        with tempfile.TemporaryDirectory(prefix=DRY_PREFIX) as parent:
            typer.echo(f"--dry: the run's folder {parent} is removed at the end", err=True)
            yield Path(parent) / name
    else:
        yield log_dir / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}" if log_dir else out


@contextmanager
def stop_after(timeout: str | None) -> Iterator[None]:
    """Send this process SIGTERM after the timeout, as a scheduler would: the run finishes its step, saves and ends."""
    if timeout is None:
        yield
        return

    def stop() -> None:
        typer.echo(f"--timeout {timeout} has passed: saving and stopping", err=True)
        os.kill(os.getpid(), signal.SIGTERM)

    timer = threading.Timer(parse_timeout(timeout), stop)
    # Must not keep the process alive after the run.
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def parse_timeout(text: str) -> int:
    """Parse DD:HH:MM:SS into seconds; days and hours are optional."""
    found = DURATION.fullmatch(text)
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups()) if found else (0, 0, 0, 0)
    total = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    if total == 0:
        raise ConfigError(f"--timeout {text} is not a duration", fix="write DD:HH:MM:SS, such as 00:11:30:00")
    return total


def parse_gpus(gpus: str) -> tuple[int, str]:
    """Return the number of ranks and CUDA_VISIBLE_DEVICES: `2` is a count, `1,2` are devices, `3,` is one device."""
    if gpus.isdecimal() and int(gpus) > 0:
        return int(gpus), ""
    names = [name.strip() for name in gpus.split(",") if name.strip()]
    # `3,` with a comma is device 3; `3` alone is a count.
    if "," in gpus and names and all(name.isdecimal() for name in names) and len(set(names)) == len(names):
        return len(names), ",".join(names)
    raise ConfigError(f"--gpus {gpus} is neither a count nor a list of GPUs", fix="write --gpus 2, or --gpus 0,1")


def start_on_gpus(gpus: str, device: str, variables: MutableMapping[str, str]) -> None:
    """Start this command once per GPU, wait for all ranks and exit with their status; with one GPU return."""
    num, visible = parse_gpus(gpus)
    if "RANK" in variables or "SLURM_STEP_NUM_TASKS" in variables:
        raise ConfigError(
            f"--gpus {gpus} cannot be used under torchrun or srun",
            why="the launcher already sets the number of ranks",
            fix="leave --gpus out, or run the command without the launcher",
        )
    if device.startswith("cuda:"):
        raise ConfigError(f"--gpus {gpus} and device {device} cannot be combined", fix="keep one of them")
    # Set before torch initialises CUDA.
    if visible:
        variables["CUDA_VISIBLE_DEVICES"] = visible
    if device != "cpu":
        import torch

        if torch.cuda.device_count() < num:
            raise ConfigError(
                f"--gpus asks for {format_count(num, 'GPU')}, but torch finds {torch.cuda.device_count()}",
                fix="ask for fewer, or train on the CPU with --device cpu",
            )
    if num > 1:
        sys.exit(launch_ranks(num, remove_gpus_flag(sys.argv[1:])))


def remove_gpus_flag(arguments: list[str]) -> list[str]:
    """Return the command line without --gpus, for each rank."""
    # `--gpus 2` is two arguments, `--gpus=2` one.
    kept, skips = [], False
    for argument in arguments:
        if skips or argument.startswith("--gpus"):
            skips = not skips and argument == "--gpus"
            continue
        kept.append(argument)
    return kept


def launch_ranks(num: int, arguments: list[str]) -> int:
    """Run `num` ranks of this command and return their exit status; a failing rank prints its own error."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # Ranks that each use all cores would slow one another down.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // num)))
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(SAVING_S))
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=num, run_id="halfstep", rdzv_backend="c10d",
        rdzv_endpoint="localhost:0", max_restarts=0, monitor_interval=0.1,
    )  # fmt: skip
    logging.disable(logging.ERROR)  # the ranks print their own errors; torchrun would repeat them
    try:
        elastic_launch(config, sys.executable)("-m", "halfstep", *arguments)
    except ChildFailedError as error:
        codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
        if not any(code > 0 for code in codes.values()):  # negative: killed by that signal, before it could print
            raise explain_killed_ranks(codes) from None
        return next(code for code in codes.values() if code > 0)
    except SignalException as asked:  # torchrun has passed the signal on: the ranks have saved and reported
        return 128 + asked.sigval
    return 0


def explain_killed_ranks(codes: Mapping[int, int]) -> RankLost:
    """Return the error for ranks that were all killed by signals and could not report anything."""
    names = {rank: signal.Signals(-code).name for rank, code in sorted(codes.items())}
    return RankLost(
        "; ".join(f"rank {rank} was killed by {name}" for rank, name in names.items()),
        why="a user, a scheduler or the OS (if host memory ran out) sent the signal",
        fix="continue from the last checkpoint with --resume RUN",
    )
