"""Handle Ctrl-C, SIGTERM and SIGHUP: finish the step, save, print how to resume. A second Ctrl-C ends at once, unsaved.

Python runs a signal handler only between two instructions of the main thread, and a step may be one call that takes
minutes. So a second thread reads the bytes that the interpreter writes to its wakeup file as soon as a signal arrives.
It answers the first Ctrl-C. It leaves the second one to the main thread, and ends the process itself if the main thread
does not react within a second.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from halfstep.errors import Interrupted

SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
"""SIGHUP (the terminal was closed; not on Windows) ends a run like a scheduler's SIGTERM."""

FINISHING_STEP = "finishing this step, then saving; press Ctrl-C again to stop without saving"
PATIENCE_S = 1.0  # time for the main thread to react to a second Ctrl-C
STOP = 0  # the byte that ends the listening thread; no signal has this number
SHOW_CURSOR = "\x1b[?25h"


class Interrupts:
    """The signal that was received, if any; true once there is one."""

    def __init__(self, *, answers: bool = True, answer: str = FINISHING_STEP) -> None:
        self.answers = answers  # whether this rank answers the first Ctrl-C on the screen
        self.answer = answer
        self.received: signal.Signals | None = None
        self.make_last_message: Callable[[], str] = lambda: "stopped by a second Ctrl-C, without saving"
        """Cleans up and returns the message to print if the main thread is stuck."""
        self._is_over = threading.Event()

    def __bool__(self) -> bool:
        return self.received is not None

    @property
    def exit_code(self) -> int:
        """Return 128 + the signal's number, as in shells; SIGTERM's if another rank received the signal."""
        return 128 + (self.received or signal.SIGTERM)

    def _note(self, number: int, frame: FrameType | None) -> None:
        """Remember the first signal; raise KeyboardInterrupt for a second Ctrl-C."""
        if self.received is not None and number == signal.SIGINT:
            self._is_over.set()
            raise KeyboardInterrupt
        self.received = self.received or signal.Signals(number)

    def _listen(self, ear: int) -> None:
        """Read signal numbers as they arrive; answer the first Ctrl-C and enforce the second."""
        has_received = False
        while (number := os.read(ear, 1)[0]) != STOP:
            if number == signal.SIGINT and has_received:
                break
            if number == signal.SIGINT and self.answers:
                _print_at_once(self.answer)
            has_received |= number in SIGNALS
        else:
            return
        # The main thread may be stuck in one long call, or Python may have merged both signals during one.
        if not self._is_over.wait(PATIENCE_S):
            _print_at_once(self.make_last_message() + (SHOW_CURSOR if sys.stderr.isatty() else ""))
            os._exit(128 + signal.SIGINT)


@contextmanager
def catch_interrupts(*, answers: bool = True, answer: str = FINISHING_STEP) -> Iterator[Interrupts]:
    """Handle signals inside; print `answer` after the first Ctrl-C if `answers` is set (on rank 0)."""
    found = Interrupts(answers=answers, answer=answer)
    if threading.current_thread() is not threading.main_thread():
        yield found  # Python allows signal handlers in the main thread only
        return
    with _handle_signals(SIGNALS, found._note), _listen_for_wakeups(found):
        yield found


@contextmanager
def _handle_signals(numbers: Iterable[int], handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Install a handler for these signals, and restore the previous ones afterwards."""
    former: dict[int, Any] = {number: signal.signal(number, handler) for number in numbers if _is_ours(number)}
    try:
        yield
    finally:
        for number, own in former.items():
            signal.signal(number, own)


@contextmanager
def _listen_for_wakeups(found: Interrupts) -> Iterator[None]:
    """Start the thread that reads the wakeup file, and stop it afterwards."""
    _keep_children_silent()
    ear, mouth = os.pipe()
    os.set_blocking(mouth, False)  # the interpreter must never block in a signal handler
    thread = threading.Thread(target=found._listen, args=(ear,), name="halfstep-signals", daemon=True)
    thread.start()
    former = signal.set_wakeup_fd(mouth, warn_on_full_buffer=False)
    try:
        yield
    finally:
        found._is_over.set()
        signal.set_wakeup_fd(former)
        os.write(mouth, bytes([STOP]))  # closing is not enough: loader processes were forked with a copy of it
        thread.join()
        os.close(mouth)
        os.close(ear)


@functools.cache  # once per process: a fork hook cannot be removed
def _keep_children_silent() -> None:
    """Keep forked data workers silent: a terminal's Ctrl-C reaches them too and must not count as a second one."""

    def forget() -> None:
        with contextlib.suppress(ValueError):
            signal.set_wakeup_fd(-1)

    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=forget)


@contextmanager
def raise_at_once(when: str = "before training began") -> Iterator[None]:
    """Raise on SIGTERM and SIGHUP as on Ctrl-C, so that a command with nothing to save cleans up."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        raise Interrupted(f"stopped by {name} {when}; nothing was left behind", exit_code=128 + number)

    with _handle_signals((number for number in SIGNALS if number != signal.SIGINT), end):
        yield


def _is_ours(number: int) -> bool:
    """True if this signal should end the run."""
    # `nohup halfstep train ...` has set SIGHUP to be ignored: leave it so.
    return number in (signal.SIGINT, signal.SIGTERM) or signal.getsignal(number) is not signal.SIG_IGN


def _print_at_once(text: str) -> None:
    """Write directly to the file: a handler may run in the middle of a print, whose buffer is not reentrant."""
    with contextlib.suppress(OSError, ValueError, AttributeError):  # stderr may be closed
        start = "\n" if sys.stderr.isatty() else ""  # the progress bar's line ends without one
        os.write(sys.stderr.fileno(), f"{start}{text}\n".encode())
