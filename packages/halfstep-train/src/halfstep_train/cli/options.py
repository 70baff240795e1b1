"""Options that several commands share, declared once."""

from __future__ import annotations

import functools
import inspect
import shlex
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from halfstep.errors import ConfigError, DataError
from halfstep_train.cli.completion import complete_run, complete_target

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


def add_flags(*names: str) -> Callable[[Command], Command]:
    """Add flags of FLAGS to a command, which receives them as `**settings`; None means that a flag was not given."""
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    flags = [inspect.Parameter(name, kind, annotation=FLAGS[name], default=None) for name in names]
    return functools.partial(_add_parameters, flags)


def add_use_options(command: Command) -> Command:
    """Add the options of `_declare_use` to a command, which receives them as `**how`."""
    return _add_parameters(inspect.signature(_declare_use, eval_str=True).parameters.values(), command)


def _add_parameters(more: Iterable[inspect.Parameter], command: Command) -> Command:
    # typer reads the signature: replace `**settings` by these parameters, after the positional one.
    first, *own, _ = inspect.signature(command, eval_str=True).parameters.values()
    required_first = sorted([first, *more, *own], key=lambda one: one.default is not one.empty)
    command.__signature__ = inspect.Signature(required_first)  # type: ignore[attr-defined]
    return command


def refuse_to_overwrite(path: Path, *, force: bool) -> None:
    """Raise ConfigError if --save names a file that exists or cannot be written, before minutes of work are spent."""
    if path.exists() and not (force and path.is_file()):
        forcing = "" if force else ", or add --force to overwrite it"
        raise ConfigError(f"--save {path} exists already", fix=f"choose another name{forcing}")
    try:  # permissions alone do not show read-only mounts and full disks
        tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        why = f"the folder {path.parent} cannot be written to: {error.strerror}"
        fix = f"create it (mkdir -p {shlex.quote(str(path.parent))}), or choose a file in another folder"
        raise ConfigError(f"--save {path} cannot be written", why=why, fix=fix) from error


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
USED, TRAINED = "What to open, then settings.", "What to train, then settings."
Arguments = Annotated[list[str], typer.Argument(metavar=TARGET, help=USED, autocompletion=complete_target)]
ArgumentsOrRun = Annotated[list[str], typer.Argument(metavar=OR_RUN, help=USED, autocompletion=complete_target)]
MaybeArguments = Annotated[
    list[str] | None, typer.Argument(metavar=TARGET, help=TRAINED, autocompletion=complete_target)
]
RunFolder = Annotated[
    Path,
    typer.Argument(metavar="RUN", help="A run's folder, created by `halfstep train`.", autocompletion=complete_run),
]

Strict = Annotated[bool | None, option("Refuse a format that the device lacks.", "--strict", panel=PRECISION)]
DataDir = Annotated[str | None, option("Data folder; default: demo data.", panel=DATA)]
Device = Annotated[str | None, option("cpu, cuda, cuda:1, mps, xpu.", panel=RUN, callback=refuse_unknown_device)]
UsedDevice = Annotated[
    str | None, option("cpu, cuda, cuda:1, mps, xpu; default: the run's.", callback=refuse_unknown_device)
]
UsedPrecision = Annotated[str | None, option("Precision to compute in; default: the run's.")]
Checkpoint = Annotated[str, option("Checkpoint to use, or its step.", metavar="best|last|NAME")]
Trust = Annotated[
    bool, option("Import the run's custom code, even if it is not the code that you trained the run with.", "--trust")
]
Json = Annotated[bool, option("Print JSON.", "--json")]


def _declare_use(
    checkpoint: Checkpoint = "best", device: UsedDevice = None, precision: UsedPrecision = None, trust: Trust = False
) -> None:
    """Declare how a command uses a trained model."""


def _flag(kind: type, help: str, *names: str, panel: str, **more: Any) -> Any:
    """Return the annotation of an optional flag."""
    return Annotated[kind | None, option(help, *names, panel=panel, **more)]


PRECISIONS = "auto, fp32, tf32, bf16, fp16, fp8, bf16-true, or another tool's spelling."
SIMULATE = "Simulate the numerics of a format that this hardware lacks."
MIXED = "Mixed precision on (bf16, or --precision-type) or off (fp32)."
PRESETS = "fast, quality, lowmem, stable, debug; classifiers: quick, nvidia90, guide, deit."
LEDGER = "Record the formats that steps really compute in, once per mode."
WATCH = "Measure all modules every N steps; warn before an overflow."
TRACKERS = "Trackers: tensorboard, wandb, mlflow, or several: wandb,mlflow."
FLAGS: dict[str, Any] = {
    "precision": _flag(str, PRECISIONS, panel=PRECISION),
    "mixed_precision": _flag(bool, MIXED, panel=PRECISION),
    "precision_type": _flag(str, "With --mixed-precision: bf16 or fp16.", panel=PRECISION),
    "bf16": _flag(bool, "Same as --precision bf16.", "--bf16", panel=PRECISION),
    "fp16": _flag(bool, "Same as --precision fp16.", "--fp16", panel=PRECISION),
    "use_optimizations": _flag(bool, "TF32 instead of strict fp32.", "--use-optimizations", panel=PRECISION),
    "strict": Strict,
    "simulate": _flag(bool, SIMULATE, "--simulate", panel=PRECISION),
    "data_dir": DataDir,
    "batch_size": _flag(int, "Samples per micro-batch.", panel=DATA),
    "image_size": _flag(int, "Image side in pixels.", panel=DATA),
    "epochs": _flag(int, "Passes over the training set.", panel=DATA),
    "max_steps": _flag(int, "At most this many steps; 0: no limit.", panel=DATA),
    "lr": _flag(float, "Learning rate.", panel=DATA),
    "num_workers": _flag(int, "Worker processes that read the data.", panel=DATA),
    "seed": _flag(int, "Seed for weights, order and augmentation.", panel=DATA),
    "preset": _flag(str, PRESETS, panel=DATA),
    "device": Device,
    "ledger": _flag(bool, LEDGER, "--ledger", panel=RUN),
    "ledger_every": _flag(int, "Like --ledger, and again every N steps.", panel=RUN),
    "watch": _flag(int, WATCH, panel=RUN),
    "track": _flag(str, TRACKERS, panel=RUN),
    "quiet": _flag(bool, "Only warnings and the summary.", "--quiet", "-q", panel=RUN),
    "verbose": _flag(bool, "Print every metric of each epoch.", "--verbose", "-v", panel=RUN),
}
"""Flags that set a config key, by their name in config/aliases.py."""
