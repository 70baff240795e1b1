"""The `halfstep` command: build the command line, normalise flags, and turn errors into messages and exit codes.

A closed pipe (`halfstep check x.py | head -1`) changes neither what a command does nor its exit code.

`evaluate` and `predict` accept the options of the run's workload in addition to the common ones. This needs no torch:
the run's config file names the workload.
"""

from __future__ import annotations

import errno
import importlib
import inspect
import io
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from halfstep.disk import GONE, redirect_to_null
from halfstep.errors import ConfigError, HalfstepError, Interrupted, MemoryLimitError
from halfstep_train.cli.completion import VARIABLE, read_typed_words
from halfstep_train.cli.options import option

if TYPE_CHECKING:
    from typing import TextIO

    from _typeshed import ReadableBuffer

    from halfstep_train.workloads.base.kind import Kind, Option


# --- standard streams that survive a closed pipe and a full disk ---


class PatientFile(io.FileIO):
    """A file that discards its output once the reader has closed the pipe."""

    def write(self, data: ReadableBuffer, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in GONE:
                raise
            redirect_to_null(self.fileno())
            return len(memoryview(data))


def wrap_standard_streams() -> None:
    """Wrap stdout and stderr of this process, unless something (such as pytest) has already replaced them."""
    if sys.stdout is sys.__stdout__ and sys.stdout is not None:
        sys.stdout = _wrap_stream(sys.stdout)
    if sys.stderr is sys.__stderr__ and sys.stderr is not None:
        sys.stderr = _wrap_stream(sys.stderr)


def flush_or_drop() -> None:
    """Flush both streams; discard what a full disk refused, which would otherwise change the exit code to 120."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            redirect_to_null(stream.fileno())


def _wrap_stream(stream: TextIO) -> TextIO:
    # A second file object on the same descriptor; it must not close it.
    buffer = io.BufferedWriter(PatientFile(stream.fileno(), "w", closefd=False))
    # Escape characters that the terminal's encoding lacks: output must never end a run.
    return io.TextIOWrapper(buffer, stream.encoding, "backslashreplace", line_buffering=bool(stream.line_buffering))


# --- commands ---

COMMANDS = (
    *("bench", "check", "compare", "detect", "dry-run", "evaluate", "exercise", "export", "formats", "guide", "ledger"),
    *("plan", "predict", "replay", "report", "runs", "top", "train", "verify"),
)
"""A command is the function `command` in the module of the same name, parsed with that module's `CONTEXT`."""

COMMANDS_ON_RUNS = ("evaluate", "predict")
"""Commands whose options depend on the workload of the run they are given."""


def build_app(names: Iterable[str] = COMMANDS, argv: Sequence[str] = ()) -> typer.Typer:
    """Build the command line with these commands; import only their modules."""
    app = typer.Typer(
        name="halfstep",
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(root)
    for name in names:
        module = importlib.import_module(f"halfstep_train.cli.{name.replace('-', '_')}")
        text = unwrap_paragraphs(module.command.__doc__)
        command = module.command
        if name in COMMANDS_ON_RUNS:
            command = add_workload_options(name, command, argv)
        app.command(name, help=text, context_settings=getattr(module, "CONTEXT", None))(command)
    return app


def unwrap_paragraphs(docstring: str) -> str:
    """Join each paragraph into one line: typer would keep a docstring's line breaks at any terminal width."""
    paragraphs = inspect.cleandoc(docstring).split("\n\n")
    return "\n\n".join(re.sub(r"\n\s*", " ", paragraph) for paragraph in paragraphs)


def show_version(asked: bool) -> None:
    if asked:
        from halfstep import __version__ as library
        from halfstep_train import __version__ as application

        typer.echo(f"halfstep {library}, halfstep-train {application}")
        raise typer.Exit


def root(
    version: bool = typer.Option(False, "--version", callback=show_version, is_eager=True, help="Show the version."),
) -> None:
    """Mixed-precision training for PyTorch: fast, safe and provable."""


# --- arguments ---


def normalise_dashes(argv: Sequence[str]) -> list[str]:
    """Write `--data_dir X` as `--data-dir X`; leave values and `key=value` overrides unchanged."""
    # Arguments after a bare `--` are never flags.
    stop = list(argv).index("--") if "--" in argv else len(argv)
    dashed = [re.sub(r"^--[^=]+", lambda flag: flag.group().replace("_", "-"), argument) for argument in argv[:stop]]
    return dashed + list(argv[stop:])


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line; exit with 0 for success, 1 for findings, 2 for a mistake in the call."""
    arguments = normalise_dashes(sys.argv[1:] if argv is None else argv) or ["--help"]
    # Only the command that was called is imported: building all of them takes longer than comparing two configs.
    chosen: Sequence[str] = arguments[:1] if arguments[0] in COMMANDS else COMMANDS
    if VARIABLE in os.environ:  # a shell asks for completions, and passes the typed words in a variable
        typed = "".join(read_typed_words(os.environ)[:1])
        chosen = [name for name in COMMANDS if name.startswith(typed)] or COMMANDS
    wrap_standard_streams()
    try:
        # Not standalone: typer would print its own errors in another form.
        sys.exit(build_app(chosen, arguments)(arguments, prog_name="halfstep", standalone_mode=False) or 0)
    except USAGE_ERROR as error:
        show_once(explain_usage_error(error))
        sys.exit(2)
    except HalfstepError as error:
        show_once(error)
        sys.exit(error.exit_code)
    except OSError as error:
        show_error(explain_os_error(error))
        sys.exit(2)
    except (MemoryError, RuntimeError) as error:
        show_once(explain_memory_error(error))
        sys.exit(2)
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(130)
    finally:
        flush_or_drop()


# --- errors ---

UNUSABLE = {getattr(errno, name) for name in ("EACCES", "EPERM", "EROFS", "EEXIST", "ENOTDIR", "EISDIR", "ENOSPC")}


def explain_os_error(error: OSError) -> HalfstepError:
    """Return the error for a user's file or folder that cannot be used; raise other OSErrors, which are bugs."""
    if error.errno == errno.ENOSPC and error.filename is None:
        return ConfigError(f"cannot write: {error.strerror}", fix="free disk space, or write to another disk")
    if error.errno not in UNUSABLE or error.filename is None:
        raise error
    if error.errno in (errno.EEXIST, errno.ENOTDIR):
        return ConfigError(f"{error.filename} exists and is not a folder", fix="choose another folder")
    return ConfigError(
        f"cannot use {error.filename}: {error.strerror}", fix="check its permissions, or choose another path"
    )


def explain_memory_error(error: MemoryError | RuntimeError) -> HalfstepError:
    """Return the error for sizes that do not fit into the host's memory; raise other RuntimeErrors, which are bugs."""
    # torch reports a failed allocation on the CPU, and a size beyond 64 bits, as a RuntimeError.
    asked = re.search(r"tried to allocate \d+ bytes|(Storage size|integer multiplication).* overflow.*", str(error))
    if asked is None and not isinstance(error, MemoryError):
        raise error
    return MemoryLimitError(
        "out of memory: this batch, image size or model does not fit into this machine's memory",
        why=asked[0] if asked else str(error).strip().split("\n")[-1],
        fix="use a smaller train.batch_size, data.image_size or model, or fewer data.num_workers",
    )


def show_once(error: HalfstepError) -> None:
    """Show an error; if several ranks raised it, only one of them shows it."""
    if error.is_shown_elsewhere is None and "RANK" in os.environ:  # started by a launcher
        from halfstep_train.run.launch import name_rank

        name_rank(error, os.environ)
    if not error.is_shown_elsewhere:
        show_error(error)


def show_error(error: HalfstepError) -> None:
    """Print an error on stderr: what, why and fix."""
    from rich.console import Console
    from rich.text import Text

    from halfstep_train.report.console import print_text

    console = Console(stderr=True)
    if isinstance(error, Interrupted):  # not a mistake, so it is not shown as an error
        print_text(console, Text(error.what, style="yellow"))
        for text in filter(None, (error.why, error.fix)):
            print_text(console, Text(f"  {text}"))
        return
    print_text(console, Text.assemble(("error: ", "bold red"), error.what))
    for label, text in (("why", error.why), ("fix", error.fix)):
        if text:
            print_text(console, Text(f"  {label}: ", style="bold") + Text(text))


USAGE_ERROR: type[Exception] = typer.BadParameter.__bases__[0]
"""Base class of the parser's errors; typer has no public name for it."""


def explain_usage_error(error: Any) -> ConfigError:
    """Return the parser's error as a ConfigError with a fix."""
    from pydantic_core import ValidationError  # not before a mistake: most commands start without it

    context = error.ctx
    called = context.command_path if context else "halfstep"
    help_text = f"{called} --help explains every argument" if " " in called else f"{called} --help lists all commands"
    if isinstance(error.__cause__, ValidationError):  # of pydantic, which converts typer's values
        wrong = error.__cause__.errors()[0]
        expected = wrong["msg"].partition(", unable")[0].replace("Input should", "must").removeprefix("Value error, ")
        return ConfigError(f"{error.param.opts[0]} {wrong['input']}: {expected}", fix=help_text)
    # Only the parser's error for an unknown option has possibilities.
    if context is None or not hasattr(error, "possibilities"):
        return ConfigError(error.format_message().rstrip("."), fix=help_text)
    near = [name for name in error.possibilities or () if name != "--help"]
    nearest = f"did you mean {' or '.join(near)}? " if near else ""
    nearest = _suggest_instead(error.option_name, context.command.params) or nearest
    return ConfigError(error.message.rstrip("."), fix=nearest + help_text)


def _suggest_instead(option: str, options: Sequence[Any]) -> str:
    """Return what to write instead of another tool's flag or of a setting written as an option; else empty."""
    from halfstep.precision.names import PRECISIONS
    from halfstep_train.config.aliases import HABITS, KEY_ALIASES, PER_RANK_KEYS, PRECISION_KEYS

    name, names = option.lstrip("-").replace("-", "_"), {one.name for one in options}
    if "quiet" in names and name in HABITS:
        return f"{HABITS[name]}. "
    precision = name.replace("_", "-")
    if precision in PRECISIONS:
        taking = [one for one in options if one.name in ("precision", "precisions", "target")]
        return f"use {taking[0].opts[0]} {taking[0].metavar or precision}. " if taking else ""
    if "arguments" in names and (name in {*KEY_ALIASES, *PRECISION_KEYS, *PER_RANK_KEYS} or "." in name):
        return f"write settings as {KEY_ALIASES.get(name, name)}=VALUE. "
    return ""


# --- options of a run's workload ---


def add_workload_options(name: str, command: Callable[..., None], argv: Sequence[str]) -> Callable[..., None]:
    """Add the options of the run's workload to `evaluate` or `predict`, which finds them by name in `context.obj`.

    The command refuses options of other families by their name, so the parser knows these, too.
    """
    from halfstep_train.workloads import KINDS

    workload = find_workload(argv, trust="--trust" in argv)
    own = find_options(KINDS.of(workload), name) if workload else ()
    panels = {one.name: (one, kind.task) for kind in KINDS.list_translators() for one in find_options(kind, name)}
    panels |= {one.name: (one, workload) for one in own}

    def call(context: typer.Context, **given: Any) -> None:
        values = {key: given.pop(f"option_{key}") for key in panels}
        context.obj = {key: value for key, value in values.items() if value is not None}
        command(context, **given)

    signature = inspect.signature(command, eval_str=True)
    more = [
        inspect.Parameter(
            f"option_{key}",  # `--class` would be no name of a parameter
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[
                bool | None if one.type is bool else str | None,
                option(
                    one.help + (f" (default {one.default})" if one.default else ""),
                    one.flag,
                    panel=f"Options of {title}",
                    hidden=bool(workload) and one not in own,
                    metavar=None if one.type is bool else one.type.__name__.upper(),
                ),
            ],
        )
        for key, (one, title) in panels.items()
    ]
    call.__doc__ = command.__doc__
    call.__signature__ = signature.replace(parameters=[*signature.parameters.values(), *more])  # type: ignore[attr-defined]
    return call


def find_workload(args: Sequence[str], *, trust: bool) -> str:
    """Return the workload of the run among the arguments; empty if there is no run, which the command then refuses."""
    from halfstep_train.config.yaml_source import read_yaml
    from halfstep_train.workloads import KINDS

    for argument in args:
        config = Path(argument) / "config.yaml"
        if not argument.startswith("-") and config.is_file():
            # Reading the YAML needs no torch, unlike loading the config.
            workload = str(read_yaml(config).values.get("workload") or "")
            if workload not in ("", *KINDS) and not trust:
                from halfstep_train.run.folder import RunFolder
                from halfstep_train.workloads.base.import_path import refuse_unknown_code

                refuse_unknown_code([workload], RunFolder(Path(argument)).read_settled().code, config)
            return workload
    return ""


def find_options(kind: Kind, command: str) -> tuple[Option, ...]:
    declared = kind.evaluate if command == "evaluate" else kind.predict
    return declared.options if declared else ()
