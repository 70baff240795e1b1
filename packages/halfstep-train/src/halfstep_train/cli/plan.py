"""`halfstep plan`: which precision each module computes in; with --memory, the peak memory of a step, by component."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from halfstep.errors import ConfigError
from halfstep_train.cli.options import Arguments, Json, add_flags, option

if TYPE_CHECKING:
    from halfstep_train.config.load import Loaded
    from halfstep_train.config.schema import RunConfig


@add_flags("precision", "data_dir", "device", "strict", "simulate")
def command(
    arguments: Arguments,
    gpu: Annotated[
        str | None, option("Plan for this GPU, which need not be in this machine: v100, 'RTX 4090'.")
    ] = None,
    memory: Annotated[bool, option("Predict peak memory by component, without running.", "--memory")] = False,
    fit: Annotated[
        str | None, option("With --memory: find the largest batch for this much memory, such as 24GB.")
    ] = None,
    ranks: Annotated[int | None, option("With --memory: predict one rank of this many, with DDP and sharded.")] = None,
    mode: Annotated[
        Literal["eager", "compile", "graph"] | None, option("With --memory: only this; default: all.")
    ] = None,
    as_json: Json = False,
    **settings: Any,
) -> None:
    """Show the precision plan that `halfstep train` would use: format and reason per module.

    With --memory: the predicted peak memory of a step for each precision, memory level and mode, and what fits a GPU.

    Example:

        halfstep plan unet --precision bf16 --gpu "RTX 2080 Ti"

        halfstep plan resnet50 'precision.modules={fc: fp32}'

        halfstep plan gpt2 --memory --gpu "RTX 3090"

        halfstep plan gpt2_xl --memory --ranks 4 --fit 24GB
    """
    from halfstep.hardware.gpus import look_up_gpu
    from halfstep_train.run.folder import refuse_missing_paths
    from halfstep_train.run.launch import read_launcher
    from halfstep_train.workloads import load

    if gpu:  # refused before torch is imported, like a missing path
        look_up_gpu(gpu)
    loaded = load(arguments[0], flags=settings, overrides=arguments[1:], launcher=read_launcher(os.environ))
    refuse_missing_paths(loaded.config)
    size = read_size(fit) if fit else 0
    if memory:
        from rich.console import Console

        with Console(stderr=True).status("loading torch and building the model") as status:
            from halfstep_train.use.plan_memory import convert_plan, plan_memory, print_memory

            config, is_made_up = _load_full_size(loaded, arguments, settings)
            asked: dict[str, Any] = {"gpu": gpu, "size": size, "ranks": ranks, "mode": mode}
            plan = plan_memory(config, settings, status.update, **asked, is_made_up=is_made_up)
        return typer.echo(json.dumps(convert_plan(plan), indent=2)) if as_json else print_memory(plan)
    for name, value in (("--fit", fit), ("--ranks", ranks), ("--mode", mode)):
        if value is not None:
            raise ConfigError(f"{name} {value} needs --memory", fix=f"--memory {name} {value}")
    from halfstep_train.run.assemble import plan_config

    decided = plan_config(loaded.config, gpu=gpu)
    if as_json:
        return typer.echo(decided.to_json())
    return typer.echo(str(decided))  # its warnings are its last lines


NO_FOLDER = "random"
"""Any text: with a data folder a workload has its full size, without one that of its demo."""
SIZES = {letter: 10 ** (3 * power) for power, letter in enumerate("mgt", 2)}
SIZES |= {f"{letter}i": 2 ** (10 * power) for power, letter in enumerate("mgt", 2)}
Flags = Mapping[str, object]


def read_size(text: str) -> int:
    """Parse `24GB` or `24 GiB` to bytes; a number alone is gigabytes."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:([mgt]i?)b?)?", text.strip().lower())
    size = int(float(found[1]) * SIZES[found[2] or "g"]) if found else 0
    if not size:
        raise ConfigError(
            f"--fit {text!r} is not a memory size", fix="write a number and its unit: --fit 24GB, or --fit 40GiB"
        )
    return size


def _load_full_size(loaded: Loaded, arguments: Sequence[str], flags: Flags) -> tuple[RunConfig, bool]:
    """Return the config at full size, and whether its data are made up.

    Without a data folder a workload would use the small size of its demo.
    """
    from halfstep_train.workloads import KINDS, load

    kind = KINDS.of(loaded.config.workload)
    if loaded.config.data.dir is not None or kind.synthetic is None:
        return loaded.config, False
    config = load(arguments[0], flags={**flags, "data_dir": NO_FOLDER}, overrides=arguments[1:]).config
    return config.replace(data={"dir": None}), True
