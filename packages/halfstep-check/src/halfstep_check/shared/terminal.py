"""The command line: standard streams that survive a reader who leaves, usage errors and messages in our form.

Copied from halfstep, which this package does not need; halfstep's tests compare the two."""

from __future__ import annotations

import errno
import inspect
import io
import os
import re
import sys
import textwrap
from typing import TYPE_CHECKING, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from halfstep_check.shared.errors import ConfigError, HalfstepError

if TYPE_CHECKING:
    from typing import TextIO

    from _typeshed import ReadableBuffer


GONE = (errno.EPIPE, errno.EIO)
"""The reader left (`| head`), or the terminal was closed."""


def redirect_to_null(file: int) -> None:
    """Redirect this file to /dev/null from now on."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, file)
    os.close(nowhere)


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
    buffer = io.BufferedWriter(PatientFile(stream.fileno(), "w", closefd=False))
    # Escape characters that the terminal's encoding lacks: output must never end a run.
    return io.TextIOWrapper(buffer, stream.encoding, "backslashreplace", line_buffering=bool(stream.line_buffering))


def unwrap_paragraphs(docstring: str) -> str:
    """Join each paragraph into one line: typer would keep a docstring's line breaks at any terminal width."""
    paragraphs = inspect.cleandoc(docstring).split("\n\n")
    return "\n\n".join(re.sub(r"\n\s*", " ", paragraph) for paragraph in paragraphs)


def show_error(error: HalfstepError) -> None:
    console = Console(stderr=True)
    print_text(console, Text.assemble(("error: ", "bold red"), error.what))
    for label, text in (("why", error.why), ("fix", error.fix)):
        if text:
            print_text(console, Text(f"  {label}: ", style="bold") + Text(text))


USAGE_ERROR: type[Exception] = typer.BadParameter.__bases__[0]
"""The base of all of the parser's own errors; typer has no public name for it."""


def explain_usage_error(error: Any) -> ConfigError:
    """Return the parser's error as a ConfigError with a fix."""
    near = [name for name in getattr(error, "possibilities", None) or () if name != "--help"]
    nearest = f"did you mean {' or '.join(near)}? " if near else ""
    called = error.ctx.command_path if error.ctx else "halfstep-check"
    what = error.message if near else error.format_message()
    return ConfigError(what.rstrip("."), fix=f"{nearest}{called} --help explains every argument")


def option(help: str, *names: str, panel: str | None = None, **more: Any) -> Any:
    """Declare an option; its help text comes first, because every option has one."""
    return typer.Option(*names, help=help, rich_help_panel=panel, **more)


def print_text(console: Console, text: Text) -> None:
    """Print a paragraph: wrapped on a terminal, elsewhere as one line, so that it can be searched.

    A path longer than the terminal is left whole, so that it can be copied.
    """
    if console.is_terminal:
        text = text.copy()
        text.plain = "\n".join(break_line(line, console.width) for line in text.plain.split("\n"))
    console.print(text, soft_wrap=True)


def break_line(line: str, width: int) -> str:
    """Break a line between words; the next lines get its indentation."""
    # Not rich's wrapping, which folds or crops a word longer than the terminal.
    indent = " " * (len(line) - len(line.lstrip()))
    return textwrap.fill(line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def make_plain_table(*titles: str) -> Table:
    """Return an empty table in our style: a rule under the titles, no frame, the first column bold."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for index, title in enumerate(titles):
        table.add_column(title, style="bold" if index == 0 else "", no_wrap=index == 0)
    return table
