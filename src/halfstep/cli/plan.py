"""`halfstep plan`: which precision goes where, before any work is done."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from halfstep.errors import ConfigError


def command(
    words: Annotated[
        list[str],
        typer.Argument(metavar="WORKLOAD|CONFIG.yaml KEY=VALUE", help="What would be trained, then settings."),
    ],
    precision: Annotated[str | None, typer.Option(help="auto, fp32, tf32, bf16, fp16, fp8, bf16-true.")] = None,
    data_dir: Annotated[str | None, typer.Option(help="Folder of the data set; default: demo data.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, mps, xpu.")] = None,
    gpu: Annotated[str | None, typer.Option(help="A GPU by name that need not be here: v100, 'RTX 4090'.")] = None,
    strict: Annotated[bool | None, typer.Option("--strict", help="An error instead of a fallback.")] = None,
    simulate: Annotated[
        bool | None, typer.Option("--simulate", help="Simulate formats that this device lacks.")
    ] = None,
    memory: Annotated[bool, typer.Option("--memory", help="Peak memory by component, before anything runs.")] = False,
    fit: Annotated[str | None, typer.Option(help="With --memory: the largest batch in so much memory: 24GB.")] = None,
    mode: Annotated[str | None, typer.Option(help="With --memory: eager, compile or graph.")] = None,
    picture: Annotated[Path | None, typer.Option(help="With --memory: stacked bars in this file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The plan as a run would store it.")] = False,
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
        from halfstep.cli.plan_memory import Asked, show

        return show(Asked(words=words, flags=flags, gpu=gpu, fit=fit, mode=mode, picture=picture, as_json=as_json))
    for option, value in (("--fit", fit), ("--mode", mode), ("--picture", picture)):
        if value is not None:
            raise ConfigError(f"{option} {value} is an option of the memory plan", fix=f"--memory {option} {value}")
    loaded = load(words[0], flags=flags, overrides=words[1:])
    decided = plan(loaded.config, gpu=gpu)
    if as_json:
        return typer.echo(decided.to_json())
    return typer.echo(str(decided))  # its warnings are its last lines
