"""Handle Ctrl-C, SIGTERM and SIGHUP: finish the step, save, print how to resume. A second Ctrl-C ends at once, unsaved.

Python runs a signal handler between two instructions of the main thread: one long call is finished first.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType
from typing import Any

from halfstep.errors import Interrupted

SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
"""SIGHUP (the terminal was closed; not on Windows) ends a run like a scheduler's SIGTERM."""

FINISHING_STEP = "finishing this step, then saving; press Ctrl-C again to stop without saving"


class Interrupts:
    """The signal that was received, if any; true once there is one."""

    def __init__(self, *, answers: bool = True, answer: str = FINISHING_STEP) -> None:
        self.answers = answers  # whether this rank answers the first Ctrl-C on the screen
        self.answer = answer
        self.received: signal.Signals | None = None

    def __bool__(self) -> bool:
        return self.received is not None

    @property
    def exit_code(self) -> int:
        """Return 128 + the signal's number, as in shells; SIGTERM's if another rank received the signal."""
        return 128 + (self.received or signal.SIGTERM)

    def _note(self, number: int, frame: FrameType | None) -> None:
        """Remember the first signal, and answer it if it is Ctrl-C; raise KeyboardInterrupt for a second Ctrl-C."""
        if self.received is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        if self.answers and number == signal.SIGINT:
            _print_at_once(self.answer)
        self.received = self.received or signal.Signals(number)


@contextmanager
def catch_interrupts(*, answers: bool = True, answer: str = FINISHING_STEP) -> Iterator[Interrupts]:
    """Handle signals inside; print `answer` after the first Ctrl-C if `answers` is set (on rank 0)."""
    found = Interrupts(answers=answers, answer=answer)
    with _handle_signals(SIGNALS, found._note):
        yield found


@contextmanager
def _handle_signals(numbers: Iterable[int], handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Install a handler for these signals, and restore the previous ones afterwards."""
    # `nohup halfstep train ...` has set SIGHUP to be ignored: leave it so.
    handled = [
        number
        for number in numbers
        if number in (signal.SIGINT, signal.SIGTERM) or signal.getsignal(number) is not signal.SIG_IGN
    ]
    if threading.current_thread() is not threading.main_thread():
        handled = []  # Python allows signal handlers in the main thread only
    former: dict[int, Any] = {number: signal.signal(number, handler) for number in handled}
    try:
        yield
    finally:
        for number, own in former.items():
            signal.signal(number, own)


def raise_at_once() -> AbstractContextManager[None]:
    """Raise on SIGTERM and SIGHUP as on Ctrl-C, so that a run with nothing to save cleans up."""

    def end(number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        raise Interrupted(f"stopped by {name} before training began; nothing was left behind", exit_code=128 + number)

    return _handle_signals([number for number in SIGNALS if number != signal.SIGINT], end)


def _print_at_once(text: str) -> None:
    """Write directly to the file: a handler may run in the middle of a print, whose buffer is not reentrant."""
    with contextlib.suppress(OSError, ValueError, AttributeError):  # stderr may be closed
        start = "\n" if sys.stderr.isatty() else ""  # the progress bar's line ends without one
        os.write(sys.stderr.fileno(), f"{start}{text}\n".encode())
