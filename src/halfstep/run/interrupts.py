"""Ctrl-C, SIGTERM and SIGHUP: finish the step, save, say how to resume. A second Ctrl-C ends at once, unsaved."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from halfstep.errors import Interrupted

SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
"""A closed terminal (SIGHUP, not on Windows) ends a run as a scheduler does."""

HEARD = "finishing this step, then saving; press Ctrl-C again to stop without saving"


class Interrupts:
    """Remembers that the user (or a scheduler) asked the run to end."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None

    def __bool__(self) -> bool:
        return self.received is not None

    @property
    def exit_code(self) -> int:
        """128 + the signal's number, as shells have it."""
        return 128 + (self.received or 0)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = self.received or signal.Signals(number)
        if number == signal.SIGINT:
            _say_at_once(HEARD)


@contextmanager
def interrupts() -> Iterator[Interrupts]:
    """Listen while inside; the former handlers come back afterwards."""
    found = Interrupts()
    if threading.current_thread() is not threading.main_thread():
        yield found  # Python allows signal handlers in the main thread only
        return
    former: dict[int, Any] = {number: signal.signal(number, found._note) for number in SIGNALS if _is_ours(number)}
    try:
        yield found
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


@contextmanager
def raised_at_once() -> Iterator[None]:
    """Before there is anything to save, SIGTERM and SIGHUP end a run as Ctrl-C does: by an error, so it tidies up."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = [number for number in SIGNALS if number != signal.SIGINT and _is_ours(number)]
    former: dict[int, Any] = {number: signal.signal(number, _raise_interrupted) for number in numbers}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def _raise_interrupted(number: int, frame: FrameType | None) -> None:
    name = signal.Signals(number).name
    raise Interrupted(f"stopped by {name} before training began; nothing was left behind", exit_code=128 + number)


def _is_ours(number: int) -> bool:
    # `nohup halfstep train ...` asked for the closed terminal to be ignored.
    return number in (signal.SIGINT, signal.SIGTERM) or signal.getsignal(number) is not signal.SIG_IGN


def _say_at_once(text: str) -> None:
    """Straight to the file: a handler may run in the middle of a print, whose buffer must not be entered twice."""
    with contextlib.suppress(OSError, ValueError, AttributeError):  # nobody there to read it
        start = "\n" if sys.stderr.isatty() else ""  # the progress bar's line ends without one
        os.write(sys.stderr.fileno(), f"{start}{text}\n".encode())
