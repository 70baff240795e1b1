"""What the compiler warns of in mid-run, a screen each time, as one line of our own: parts of the model stay eager."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch._dynamo.variables.tensor import TensorVariable

from halfstep.disk import variable

SOURCES = ("torch._dynamo.convert_frame", "torch._dynamo.variables.tensor")
"""Loggers of the warnings below; a filter holds for the logger it was given to, not for those under it."""

TOO_OFTEN = re.compile(
    r"torch\._dynamo hit config\.\w+ .*?last reason: (?:\S+: )?(?P<reason>[^\n]*?)(?: \(HINT|\n)", re.DOTALL
)
BREAK = re.compile(
    r"Graph break from (?P<what>`[^`]*`).*File \"(?P<file>[^\"]*)\", line (?P<line>\d+)[^\n]*\n *(?P<code>[^\n]*)",
    re.DOTALL,
)
MOST_CHARACTERS = 250
"""Of a reason, which quotes code."""


class CompilerWarnings:
    """Says each kind once; with TORCH_LOGS the compiler's own words stay as well."""

    def __init__(self, say: Callable[[str], None]) -> None:
        # torch warns of a break once in a process, and a trial, in which nobody listens, would have had it.
        if warned := getattr(TensorVariable, "_warn_capture_scalar_outputs", None):  # torch's own, and may go
            warned.cache_clear()
        self._say = say
        self._said: set[re.Pattern[str]] = set()

    @contextmanager
    def in_one_line(self) -> Iterator[None]:
        """Around steps that may compile."""
        loggers = [logging.getLogger(name) for name in SOURCES]
        for logger in loggers:
            logger.addFilter(self._passes)
        try:
            yield
        finally:
            for logger in loggers:
                logger.removeFilter(self._passes)

    def _passes(self, record: logging.LogRecord) -> bool:
        text = record.getMessage()
        kind, line = _ours(text)
        if kind is None:
            return True
        if kind not in self._said:
            self._said.add(kind)
            self._say(line)
        return bool(variable("TORCH_LOGS"))


def _ours(text: str) -> tuple[re.Pattern[str] | None, str]:
    if found := TOO_OFTEN.match(text):
        reason = " ".join(found["reason"].split())[:MOST_CHARACTERS]
        return TOO_OFTEN, f"a part of the model was compiled again too often and is compiled no more: {reason}"
    if found := BREAK.match(text):
        place = f"{found['file']}:{found['line']}: {found['code'].strip()}"[:MOST_CHARACTERS]
        return BREAK, f"compiled in parts, which is slower: {found['what']} waits for the device at {place}"
    return None, ""
