"""The `halfstep` command: collects the commands, normalises flags, turns our errors into messages and exit codes.

A reader may leave (`halfstep check x.py | head -1`): neither what a command does nor its exit code depends on that.
"""

from __future__ import annotations

import errno
import importlib
import inspect
import io
import os
import re
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import typer

from halfstep.cli.usage import USAGE_ERROR, OnceCommand, RunCommand, refused
from halfstep.disk import GONE, drop, normalise_path
from halfstep.errors import ConfigError, HalfstepError, Interrupted, MemoryLimitError

if TYPE_CHECKING:
    from typing import TextIO

    from _typeshed import ReadableBuffer


class PatientFile(io.FileIO):
    """Writes until nobody reads any more, then to nowhere."""

    def write(self, data: ReadableBuffer, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in GONE:
                raise
            drop(self.fileno())
            return len(memoryview(data))


def make_patient() -> None:
    """Both standard streams of a real process; those that somebody put in their place are left alone."""
    if sys.stdout is sys.__stdout__ and sys.stdout is not None:
        sys.stdout = _patient(sys.stdout)
    if sys.stderr is sys.__stderr__ and sys.stderr is not None:
        sys.stderr = _patient(sys.stderr)


def flush_or_drop() -> None:
    """What a full disk refused must not come up again when Python ends: that would change the exit code to 120."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            drop(stream.fileno())


def _patient(stream: TextIO) -> TextIO:
    buffer = io.BufferedWriter(PatientFile(stream.fileno(), "w", closefd=False))
    # A terminal that lacks a character gets its number: output never ends a run.
    return io.TextIOWrapper(buffer, stream.encoding, "backslashreplace", line_buffering=bool(stream.line_buffering))


COMMANDS = (
    *("bench", "check", "compare", "detect", "dry-run", "evaluate", "exercise", "formats", "guide", "ledger"),
    *("pack", "plan", "predict", "replay", "report", "top", "train", "verify"),
)
"""Each is the function `command` of the module of its name, parsed with the settings in the module's `CONTEXT`."""

CLASSES = {"evaluate": RunCommand, "predict": RunCommand}
"""Commands whose options depend on the run they are given."""


def app_with(names: Iterable[str] = COMMANDS) -> typer.Typer:
    """The command line with these commands; a module is imported only when its command is there."""
    app = typer.Typer(
        name="halfstep",
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(root)
    for name in names:
        module = importlib.import_module(f"halfstep.cli.{name.replace('-', '_')}")
        text = unwrapped(module.command.__doc__)
        kind = CLASSES.get(name, OnceCommand)
        app.command(name, help=text, cls=kind, context_settings=getattr(module, "CONTEXT", None))(module.command)
    return app


def unwrapped(docstring: str) -> str:
    """Each paragraph as one line: typer keeps a docstring's own line breaks, whatever the terminal's width."""
    paragraphs = inspect.cleandoc(docstring).split("\n\n")
    return "\n\n".join(re.sub(r"\n\s*", " ", paragraph) for paragraph in paragraphs)


def names_for(argv: Sequence[str]) -> Sequence[str]:
    """The command asked for alone: building the others takes longer than comparing two configs."""
    return argv[:1] if argv and argv[0] in COMMANDS else COMMANDS


def show_version(asked: bool) -> None:
    if asked:
        from halfstep import __version__

        typer.echo(f"halfstep {__version__}")
        raise typer.Exit


def root(
    version: bool = typer.Option(False, "--version", callback=show_version, is_eager=True, help="Show the version."),
) -> None:
    """Mixed-precision training for PyTorch: fast, safe and provable."""


def with_dashes(argv: Sequence[str]) -> list[str]:
    """`--data_dir X` and `--data-dir X` are the same flag; values and `key=value` overrides stay as they are."""
    stop = list(argv).index("--") if "--" in argv else len(argv)
    dashed = [re.sub(r"^--[^=]+", lambda flag: flag.group().replace("_", "-"), word) for word in argv[:stop]]
    return dashed + list(argv[stop:])


def with_short_paths(argv: Sequence[str]) -> list[str]:
    """`data/../d` is `d`, as an argument or after `--flag=`; a run makes the paths of its settings absolute itself."""

    def shorten(word: str) -> str:
        flag, equals, value = word.partition("=") if word.startswith("--") else ("", "", word)
        # Other texts may hold `..` as well: a path goes up from a folder that is there.
        is_path = ".." in value.split(os.sep) and "=" not in value and os.path.isdir(value[: value.rindex("..") + 2])
        return f"{flag}{equals}{normalise_path(value)}" if is_path else word

    return [shorten(word) for word in argv]


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line; exit 0 only when what it says holds, 1 for findings, 2 for the user's own mistake."""
    words = with_short_paths(with_dashes(sys.argv[1:] if argv is None else argv)) or ["--help"]
    make_patient()
    try:
        # Not standalone: typer would draw its own errors, in another form than ours.
        sys.exit(app_with(names_for(words))(words, prog_name="halfstep", standalone_mode=False) or 0)
    except USAGE_ERROR as error:
        show_once(refused(error))
        sys.exit(2)
    except HalfstepError as error:
        show_once(error)
        sys.exit(error.exit_code)
    except OSError as error:
        show_error(unusable_place(error))
        sys.exit(2)
    except (MemoryError, RuntimeError) as error:
        show_once(too_large(error))
        sys.exit(2)
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(130)
    finally:
        flush_or_drop()


UNUSABLE = {getattr(errno, name) for name in ("EACCES", "EPERM", "EROFS", "EEXIST", "ENOTDIR", "EISDIR", "ENOSPC")}


def unusable_place(error: OSError) -> HalfstepError:
    """A file or folder that the user named and that cannot be written or read; anything else is our mistake."""
    if error.errno == errno.ENOSPC and error.filename is None:
        from halfstep.report.run_report import unwritable_output

        return unwritable_output(error)
    if error.errno not in UNUSABLE or error.filename is None:
        raise error
    if error.errno in (errno.EEXIST, errno.ENOTDIR):
        return ConfigError(f"{error.filename} is in the way", why="it is a file, or inside one", fix="name a folder")
    return ConfigError(
        f"cannot use {error.filename}: {error.strerror}", fix="look at its permissions, or choose another place"
    )


def too_large(error: MemoryError | RuntimeError) -> HalfstepError:
    """Sizes that no memory holds, such as a number with a digit too many; torch says so by a RuntimeError."""
    asked = re.search(r"DefaultCPUAllocator: .*?(tried to allocate \d+ bytes)", str(error))
    if asked is None and not isinstance(error, MemoryError):
        raise error
    return MemoryLimitError(
        "out of memory: this machine has too little for these sizes",
        why=asked[1] if asked else str(error).strip().split("\n")[-1],
        fix="a smaller train.batch_size, data.image_size or model, or fewer data.num_workers",
    )


def show_once(error: HalfstepError) -> None:
    """Of several processes that met the same error, one shows it."""
    if error.is_told is None and "RANK" in os.environ:
        from halfstep.distributed.launch import tell_before_meeting

        tell_before_meeting(error, os.environ)
    if not error.is_told:
        show_error(error)


def show_error(error: HalfstepError) -> None:
    from rich.console import Console
    from rich.text import Text

    from halfstep.report.tables import print_text

    console = Console(stderr=True)
    if isinstance(error, Interrupted):  # no mistake, and nothing to fix: it says itself who stopped it
        print_text(console, Text(error.what, style="yellow"))
        for text in filter(None, (error.why, error.fix)):
            print_text(console, Text(f"  {text}"))
        return
    print_text(console, Text.assemble(("error: ", "bold red"), error.what))
    for label, text in (("why", error.why), ("fix", error.fix)):
        if text:
            print_text(console, Text(f"  {label}: ", style="bold") + Text(text))
