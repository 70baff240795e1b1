"""`halfstep plan`: which precision goes where, before any work is done."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from halfstep.cli.options import DataDir, Device, Json, Precision, Simulate, Strict, Words, option
from halfstep.errors import ConfigError


def command(
    words: Words,
    precision: Precision = None,
    data_dir: DataDir = None,
    device: Device = None,
    gpu: Annotated[str | None, option("A GPU by name; it need not be in this machine: v100, 'RTX 4090'.")] = None,
    strict: Strict = None,
    simulate: Simulate = None,
    memory: Annotated[bool, option("Peak memory by component, before anything runs.", "--memory")] = False,
    fit: Annotated[str | None, option("With --memory: the largest batch that fits this memory, such as 24GB.")] = None,
    mode: Annotated[str | None, option("With --memory: only eager, compile or graph; default: all.")] = None,
    picture: Annotated[Path | None, option("With --memory: stacked bars in this file.")] = None,
    as_json: Json = False,
) -> None:
    """Which precision goes where, and why: the plan that `halfstep train` would run, one row per module. With --memory:
    what a step needs in each precision, memory level and mode, and what fits a GPU.

    Example:

        halfstep plan unet --precision bf16 --gpu "RTX 2080 Ti"

        halfstep plan resnet50 'precision.modules={fc: fp32}'

        halfstep plan gpt2 --memory --gpu "RTX 3090"
    """
    from halfstep.run.plan import plan
    from halfstep.workloads import load

    flags = {"precision": precision, "data_dir": data_dir, "device": device, "strict": strict, "simulate": simulate}
    if memory:
        from halfstep.cli.plan_memory import show

        return show(words, flags, gpu=gpu, fit=fit, mode=mode, picture=picture, as_json=as_json)
    for name, value in (("--fit", fit), ("--mode", mode), ("--picture", picture)):
        if value is not None:
            raise ConfigError(f"{name} {value} is an option of the memory plan", fix=f"--memory {name} {value}")
    loaded = load(words[0], flags=flags, overrides=words[1:])
    decided = plan(loaded.config, gpu=gpu)
    if as_json:
        return typer.echo(decided.to_json())
    return typer.echo(str(decided))  # its warnings are its last lines
