"""`--gpus`: one process a GPU, started and watched by torchrun's own launcher."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, MutableMapping

from halfstep.errors import ConfigError


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
        sys.exit(launched(num, without_gpus(sys.argv[1:]), variables))


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


def launched(num: int, words: list[str], variables: Mapping[str, str]) -> int:
    """The exit status of `num` processes of this command; an error was shown by the one that met it."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    if "OMP_NUM_THREADS" not in variables:
        os.environ["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // num))
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num,
        run_id="halfstep",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.1,
    )
    try:
        elastic_launch(config, sys.executable)("-m", "halfstep", *words)
    except ChildFailedError as error:
        codes = [failure.exitcode for failure in error.failures.values()]
        return next((code for code in codes if code > 0), 1)
    return 0
