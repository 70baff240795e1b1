"""Which shapes of batches have compiled code: the first two that come.

Each further one would compile for as long as the first did, and a workload that resizes its images brings them without
end. The shapes are stored with the run, for compiled and eager kernels round differently: a resumed run that met its
shapes in another order would compile others.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from subprocess import CalledProcessError
from typing import TypeAlias

from torch._dynamo.variables.tensor import TensorVariable

from halfstep.disk import read_variable
from halfstep.errors import summarise_error
from halfstep.tune.modes import Batch

MOST_SHAPES = 2  # an image in portrait and in landscape format, or two sizes in turn

TensorShape: TypeAlias = tuple[str, tuple[int, ...], tuple[int, ...], str]  # name, size, strides and dtype
BatchShape: TypeAlias = tuple[TensorShape, ...]


class CompiledShapes:
    def __init__(self) -> None:
        self.taken: list[BatchShape] = []  # what is compiled for, now or when it comes
        self.ready: set[BatchShape] = set()
        """What went through compiled code of this process, there and back: later failures are not the compiler's."""
        self._has_said = False

    def take(self, batch: Batch) -> bool:
        """Whether batches of this shape have compiled code; a new shape gets it while there is room."""
        shape = batch_shape(batch)
        if shape not in self.taken and len(self.taken) < MOST_SHAPES:
            self.taken.append(shape)
        return shape in self.taken

    def why_eager(self, batch: Batch) -> str:
        """For the user, the first time a shape has no room."""
        if self._has_said:
            return ""
        self._has_said = True
        return (
            f"batches come in more than {MOST_SHAPES} shapes (now {self._new_in(batch_shape(batch))}): code is compiled"
            f" for the first {MOST_SHAPES}, others run eager; one size for all, or padding to it, makes every step fast"
        )

    def forget(self) -> None:
        """Batches will be cut into other pieces."""
        self.taken.clear()
        self.ready.clear()

    def _new_in(self, shape: BatchShape) -> str:
        known = {tensor for other in self.taken for tensor in other}
        new = [tensor for tensor in shape if tensor not in known] or shape
        sizes = {tensor[:2] for tensor in known}
        return ", ".join(
            f"{name} {'x'.join(map(str, size))}" + (f" of {dtype}, strides {strides}" if (name, size) in sizes else "")
            for name, size, strides, dtype in new
        )


def batch_shape(batch: Batch) -> BatchShape:
    """What must be equal for two batches to share compiled code."""
    return tuple(
        (name, tuple(value.shape), tuple(value.stride()), str(value.dtype).removeprefix("torch."))
        for name, value in sorted(batch.items())
    )


# --- why code could not be compiled ---

OF_A_TOOL = re.compile(r"\berror: |No space left on device")
"""How a C++ compiler, an assembler or a linker says what it could not do, below pages of its command."""
MOST_CHARACTERS = 400  # of the whole line: templates of C++ have names without end


def compile_reason(error: Exception) -> str:
    """The first line, and what lies below it: a tool's own complaint, or the error that all began with."""
    first = summarise_error(error)
    found = _of_a_tool(str(error)) or summarise_error(_root(error))
    reason = first if found in first else f"{first}: {found}"
    return reason if len(reason) <= MOST_CHARACTERS else f"{reason[:MOST_CHARACTERS]} ..."


def _of_a_tool(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if OF_A_TOOL.search(line)), "")


def _root(error: BaseException) -> BaseException:
    """The first below the compiler's own errors, which hide it; a command that failed says nothing but itself."""
    below = error.__cause__ or error.__context__
    is_the_compilers = type(error).__module__.startswith("torch.")
    return _root(below) if below and is_the_compilers and not isinstance(below, CalledProcessError) else error


# --- what the compiler warns of in mid-run, a screen each time, as one line: parts of the model stay eager ---

SOURCES = ("torch._dynamo.convert_frame", "torch._dynamo.variables.tensor")
"""Loggers of the warnings below; a filter holds for the logger it was given to, not for those under it."""

TOO_OFTEN = re.compile(
    r"torch\._dynamo hit config\.\w+ .*?last reason: (?:\S+: )?(?P<reason>[^\n]*?)(?: \(HINT|\n)", re.DOTALL
)
BREAK = re.compile(
    r"Graph break from (?P<what>`[^`]*`).*File \"(?P<file>[^\"]*)\", line (?P<line>\d+)[^\n]*\n *(?P<code>[^\n]*)",
    re.DOTALL,
)
MOST_QUOTED = 250  # of a reason, which quotes code


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
        return bool(read_variable("TORCH_LOGS"))


def _ours(text: str) -> tuple[re.Pattern[str] | None, str]:
    if found := TOO_OFTEN.match(text):
        reason = " ".join(found["reason"].split())[:MOST_QUOTED]
        return TOO_OFTEN, f"a part of the model was compiled again too often and is compiled no more: {reason}"
    if found := BREAK.match(text):
        place = f"{found['file']}:{found['line']}: {found['code'].strip()}"[:MOST_QUOTED]
        return BREAK, f"compiled in parts, which is slower: {found['what']} waits for the device at {place}"
    return None, ""
