"""Options that several commands share, declared once."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

PRECISION, DATA, RUN, SHOW = "Precision", "Data and training", "Run", "Look without training"


def read_given(context: typer.Context) -> dict[str, Any]:
    """What was given on the command line, by the parameter's name."""
    sources = ((name, context.get_parameter_source(name)) for name in context.params)
    return {name: context.params[name] for name, source in sources if source and source.name == "COMMANDLINE"}


def map_flags(context: typer.Context) -> dict[str, str]:
    """The options of a command by the parameter's name."""
    return {one.name or "": one.opts[0] for one in context.command.params if one.param_type_name == "option"}


def option(help: str, *names: str, panel: str | None = None, **more: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=panel, **more)


Command = TypeVar("Command", bound=Callable[..., None])


def add_flags(flags: type) -> Callable[[Command], Command]:
    """Gives a command, as its `**settings`, the flags that a class declares; they stand behind its first argument."""

    def given(command: Command) -> Command:
        first, *own, _ = inspect.signature(command, eval_str=True).parameters.values()
        hints = get_type_hints(flags, include_extras=True)
        more = [first.replace(name=name, annotation=hint, default=getattr(flags, name)) for name, hint in hints.items()]
        command.__signature__ = inspect.Signature([first, *more, *own])  # type: ignore[attr-defined]
        return command

    return given


Words = Annotated[list[str], typer.Argument(metavar="WORKLOAD|CONFIG.yaml KEY=VALUE", help="What, then settings.")]
WordsOrRun = Annotated[
    list[str], typer.Argument(metavar="WORKLOAD|CONFIG.yaml|RUN KEY=VALUE", help="What, then settings.")
]
MaybeWords = Annotated[
    list[str] | None, typer.Argument(metavar="WORKLOAD|CONFIG.yaml KEY=VALUE", help="What to train, then settings.")
]
RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder, as `halfstep train` named it.")]

Precision = Annotated[
    str | None, option("auto, fp32, tf32, bf16, fp16, fp8, bf16-true, or another tool's name.", panel=PRECISION)
]
Strict = Annotated[bool | None, option("Refuse a format that the device lacks.", "--strict", panel=PRECISION)]
Simulate = Annotated[bool | None, option("Numerics of a format this hardware lacks.", "--simulate", panel=PRECISION)]
DataDir = Annotated[str | None, option("Data folder; default: demo data.", panel=DATA)]
BatchSize = Annotated[int | None, option("Samples per micro-batch.", panel=DATA)]
ImageSize = Annotated[int | None, option("Image side in pixels.", panel=DATA)]
Epochs = Annotated[int | None, option("Passes over the training set.", panel=DATA)]
MaxSteps = Annotated[int | None, option("At most this many steps; 0: no limit.", panel=DATA)]
Device = Annotated[str | None, option("cpu, cuda, cuda:1, mps, xpu.", panel=RUN)]
UsedDevice = Annotated[str | None, option("cpu, cuda, cuda:1, mps, xpu; default: the run's.")]
UsedPrecision = Annotated[str | None, option("Another precision than the run's.")]
Checkpoint = Annotated[str, option("Which checkpoint, or its step.", metavar="best|last|NAME")]
Trust = Annotated[bool, option("Run the code that the run names, though it is not what you trained with.", "--trust")]
Json = Annotated[bool, option("Print JSON.", "--json")]
