"""Delay Python's signal handlers while a step is committed or undone, so that Ctrl-C cannot tear it.

Ctrl-C raises KeyboardInterrupt between any two bytecodes: between the optimizer and the average, say. Blocking the
signal with pthread_sigmask does not help: the kernel then hands it to one of torch's threads, and Python still runs the
handler in the main thread. So the handlers themselves are replaced for the time of the call, for every signal whose
handler may raise. It costs a few microseconds per step.
"""

from __future__ import annotations

# The C functions of `signal`: its wrappers make enums of what they return, at five times the cost.
import _signal  # type: ignore[import-not-found]
import signal
import sys
import threading
from types import FrameType
from typing import Any

SIGNALS = [
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGALRM", "SIGUSR1", "SIGUSR2", "SIGHUP")
    if hasattr(signal, name)  # Windows has two of them
]


class DelayedSignals:
    """Handlers that wait inside `delay()`, but not inside `allow()` within it."""

    def __init__(self) -> None:
        self._handlers: dict[int, Any] = {}  # the user's: ours passes signals on to them
        self._pending: list[int] = []
        self._depth = 0
        self._is_allowed = False
        self._ours = self._receive  # once: each look at it makes a new method

    def delay(self) -> Delay:
        """Run the handlers of signals that arrive inside when the block ends; of nested blocks, the outermost."""
        return Delay(self)

    def allow(self) -> Allow:
        """Let handlers run at once inside: for the user's code, which may take long and can be undone."""
        return Allow(self)

    def begin(self) -> None:
        try:
            self._install()
            self._depth = 1
        except BaseException:  # a handler ran before ours was in its place, and raised
            self.end()
            raise

    def end(self) -> None:
        try:
            self._depth = 0  # what arrives from here on is passed on at once
            self._uninstall()
        finally:
            self._uninstall()  # again: a handler may have raised in between
            self._run_pending()

    def _install(self) -> None:
        for number in SIGNALS:
            handler = _signal.getsignal(number)
            if handler is not self._ours and callable(handler):
                self._handlers[number] = handler
                _signal.signal(number, self._ours)

    def _uninstall(self) -> None:
        for number, handler in self._handlers.items():
            if _signal.getsignal(number) is self._ours:  # and not what the user's code has set since
                _signal.signal(number, handler)

    def _run_pending(self) -> None:
        if self._pending:
            number = self._pending.pop(0)
            try:
                self._handlers[number](number, sys._getframe())
            finally:
                self._run_pending()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        # A second one of a kind is not delayed: what is inside may hang.
        if self._depth and not self._is_allowed and number not in self._pending:
            self._pending.append(number)
        else:
            self._handlers[number](number, frame)


class Allow:
    """A block of `DelayedSignals.allow`. A class, as `Delay`: every step enters them, and generators take twice the
    time."""

    def __init__(self, signals: DelayedSignals) -> None:
        self.signals = signals

    def __enter__(self) -> None:
        self.signals._is_allowed = True
        try:
            self.signals._run_pending()
        except BaseException:
            self.signals._is_allowed = False
            raise

    def __exit__(self, *error: object) -> None:
        self.signals._is_allowed = False


class Delay:
    """A block of `DelayedSignals.delay`."""

    def __init__(self, signals: DelayedSignals) -> None:
        self.signals, self.is_outermost = signals, False

    def __enter__(self) -> None:
        # Python runs handlers in the main thread only.
        if not self.signals._depth and threading.current_thread() is threading.main_thread():
            self.is_outermost = True
            self.signals.begin()

    def __exit__(self, *error: object) -> None:
        if self.is_outermost:
            self.signals.end()
