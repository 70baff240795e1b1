"""Standard output and error that a reader may leave: what a command does, and its exit code, do not depend on it.

Without this `halfstep check x.py | head -1` ends with 0, 1 or 120, by how much was printed before `head` was gone.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import TextIO

    from _typeshed import ReadableBuffer


GONE = (errno.EPIPE, errno.EIO)
"""The reader left, or the terminal was closed."""


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


def drop(file: int) -> None:
    """From here on this file is /dev/null."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, file)
    os.close(nowhere)


def _patient(stream: TextIO) -> TextIO:
    buffer = io.BufferedWriter(PatientFile(stream.fileno(), "w", closefd=False))
    # A terminal that lacks a character gets its number: output never ends a run.
    return io.TextIOWrapper(buffer, stream.encoding, "backslashreplace", line_buffering=bool(stream.line_buffering))
