"""Ctrl-C and SIGTERM: finish the step, save, say how to resume. A second Ctrl-C ends at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


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
        self.received = signal.Signals(number)


@contextmanager
def interrupts() -> Iterator[Interrupts]:
    """Listen while inside; the former handlers come back afterwards."""
    found = Interrupts()
    if threading.current_thread() is not threading.main_thread():
        yield found  # Python allows signal handlers in the main thread only
        return
    former: dict[int, Any] = {number: signal.signal(number, found._note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield found
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
