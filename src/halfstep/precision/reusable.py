"""Contexts that people keep in a variable, as they keep an autocast, and enter as often as they like."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from types import TracebackType


class Reusable(contextlib.ContextDecorator):
    """Entered again and again, also inside itself and from several threads: each entry makes the context again."""

    def __init__(self, make: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
        self._make, self._entered = make, threading.local()

    def __enter__(self) -> None:
        context = self._make()
        context.__enter__()
        self._stack().append(context)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        return self._stack().pop().__exit__(kind, error, traceback)

    def _stack(self) -> list[contextlib.AbstractContextManager[None]]:
        stack: list[contextlib.AbstractContextManager[None]] = self._entered.__dict__.setdefault("stack", [])
        return stack
