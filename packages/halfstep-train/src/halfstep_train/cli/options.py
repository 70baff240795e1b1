"""Options that several commands share, declared once."""

from __future__ import annotations

import inspect
import shlex
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

from halfstep.errors import ConfigError, DataError
from halfstep_train.cli.completion import complete_precision, complete_run, complete_target, complete_target_or_run

PRECISION, DATA, RUN, SHOW = "Precision", "Data and training", "Run", "Show without training"


def read_given(context: typer.Context) -> dict[str, Any]:
    """Return the values given on the command line, by parameter name."""
    # A value equal to the default still counts as given.
    sources = ((name, context.get_parameter_source(name)) for name in context.params)
    return {name: context.params[name] for name, source in sources if source and source.name == "COMMANDLINE"}


def map_flags(context: typer.Context) -> dict[str, str]:
    """Return the flag of each option, by parameter name."""
    return {one.name or "": one.opts[0] for one in context.command.params if one.param_type_name == "option"}


def option(help: str, *names: str, panel: str | None = None, **more: Any) -> Any:
    """Declare an option; its help text comes first, because every option has one."""
    return typer.Option(*names, help=help, rich_help_panel=panel, **more)


Command = TypeVar("Command", bound=Callable[..., None])


def add_flags(flags: type) -> Callable[[Command], Command]:
    """Add the flags that a class declares to a command, which receives them as `**settings`."""

    def add(command: Command) -> Command:
        # typer reads the signature: replace `**settings` by one parameter per flag, after the positional one.
        first, *own, _ = inspect.signature(command, eval_str=True).parameters.values()
        hints = get_type_hints(flags, include_extras=True)
        more = [first.replace(name=name, annotation=hint, default=getattr(flags, name)) for name, hint in hints.items()]
        command.__signature__ = inspect.Signature([first, *more, *own])  # type: ignore[attr-defined]
        return command

    return add


def refuse_to_overwrite(paths: Mapping[str, Path | None], *, force: bool | None = None) -> None:
    """Raise ConfigError for an output file that exists or cannot be written, before minutes of work are spent.

    `paths` are the files by option. `force` is None for a command without --force.
    """
    for option, path in paths.items():
        if path is None:
            continue
        if path.exists() and not (force and path.is_file()):
            forcing = ", or add --force to overwrite it" if force is False else ""
            raise ConfigError(f"{option} {path} exists already", fix=f"choose another name{forcing}")
        try:  # permissions alone do not show read-only mounts and full disks
            tempfile.TemporaryFile(dir=path.parent).close()
        except OSError as error:
            why = f"the folder {path.parent} cannot be written to: {error.strerror}"
            fix = f"create it (mkdir -p {shlex.quote(str(path.parent))}), or choose a file in another folder"
            raise ConfigError(f"{option} {path} cannot be written", why=why, fix=fix) from error


def refuse_bad_run(run: Path, out: Path | None, data: Path | None = None) -> None:
    """Raise for what is not a run, a used output folder and missing data, before torch is imported."""
    from halfstep_train.run.folder import RunFolder as Folder
    from halfstep_train.run.folder import refuse_used_folder

    Folder.open(str(run))
    if out is not None:
        refuse_used_folder(out)
    if data is not None and not data.exists():
        raise DataError(f"--data {data} does not exist", fix="give a data folder, or a file if the run trained on one")


def refuse_unknown_device(name: str | None) -> str | None:
    """Raise for a --device that no machine has, before torch is imported, which knows the devices of this one."""
    from halfstep_train.config.schema import is_device

    if name and not is_device(name):
        raise ConfigError(f"--device {name}: there is no such kind of device", fix=f"use one of {DEVICES}")
    return name


DEVICES = "auto, cpu, cuda, cuda:1, mps, xpu"
TARGET, OR_RUN = "WORKLOAD|CONFIG.yaml KEY=VALUE", "WORKLOAD|CONFIG.yaml|RUN KEY=VALUE"
USED, TRAINED = "What to use, then settings.", "What to train, then settings."
Arguments = Annotated[list[str], typer.Argument(metavar=TARGET, help=USED, autocompletion=complete_target)]
ArgumentsOrRun = Annotated[list[str], typer.Argument(metavar=OR_RUN, help=USED, autocompletion=complete_target_or_run)]
MaybeArguments = Annotated[
    list[str] | None, typer.Argument(metavar=TARGET, help=TRAINED, autocompletion=complete_target)
]
RunFolder = Annotated[
    Path,
    typer.Argument(metavar="RUN", help="A run's folder, created by `halfstep train`.", autocompletion=complete_run),
]

Precision = Annotated[
    str | None,
    option(
        "auto, fp32, tf32, bf16, fp16, fp8, bf16-true, or another tool's spelling.",
        panel=PRECISION,
        autocompletion=complete_precision,
    ),
]
Strict = Annotated[bool | None, option("Refuse a format that the device lacks.", "--strict", panel=PRECISION)]
Simulate = Annotated[
    bool | None, option("Simulate the numerics of a format that this hardware lacks.", "--simulate", panel=PRECISION)
]
DataDir = Annotated[str | None, option("Data folder; default: demo data.", panel=DATA)]
BatchSize = Annotated[int | None, option("Samples per micro-batch.", panel=DATA)]
ImageSize = Annotated[int | None, option("Image side in pixels.", panel=DATA)]
Epochs = Annotated[int | None, option("Passes over the training set.", panel=DATA)]
MaxSteps = Annotated[int | None, option("At most this many steps; 0: no limit.", panel=DATA)]
Device = Annotated[str | None, option("cpu, cuda, cuda:1, mps, xpu.", panel=RUN, callback=refuse_unknown_device)]
UsedDevice = Annotated[
    str | None, option("cpu, cuda, cuda:1, mps, xpu; default: the run's.", callback=refuse_unknown_device)
]
UsedPrecision = Annotated[str | None, option("Precision to compute in; default: the run's.")]
Checkpoint = Annotated[str, option("Which checkpoint, or its step.", metavar="best|last|NAME")]
Trust = Annotated[
    bool, option("Import the run's custom code, even if it is not the code that you trained the run with.", "--trust")
]
Json = Annotated[bool, option("Print JSON.", "--json")]
