"""Choose which batch shapes get compiled code: the first two.

Each further shape would take as long to compile as the first, and a workload that resizes its images produces new
shapes without end. The shapes are stored with the run, because compiled and eager kernels round differently: a resumed
run that met its shapes in another order would compile others.
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
from halfstep_train.tune.modes import Batch

MOST_SHAPES = 2  # portrait and landscape images, or two alternating sizes

TensorShape: TypeAlias = tuple[str, tuple[int, ...], tuple[int, ...], str]  # name, size, strides and dtype
BatchShape: TypeAlias = tuple[TensorShape, ...]


class CompiledShapes:
    """The batch shapes of a run that have compiled code."""

    def __init__(self) -> None:
        self.taken: list[BatchShape] = []  # shapes that have or get compiled code
        self.ready: set[BatchShape] = set()
        """Shapes that ran through compiled forward and backward in this process: later failures are not the
        compiler's."""
        self._has_warned = False

    def admit(self, batch: Batch) -> bool:
        """True if batches of this shape run compiled; a new shape is added while there is room."""
        shape = get_batch_shape(batch)
        if shape not in self.taken and len(self.taken) < MOST_SHAPES:
            self.taken.append(shape)
        return shape in self.taken

    def explain_eager(self, batch: Batch) -> str:
        """Return a message the first time that a shape has no room, else an empty string."""
        if self._has_warned:
            return ""
        self._has_warned = True
        new = ", ".join(
            f"{name} {'x'.join(map(str, size))} of {dtype}, strides {strides}"
            for name, size, strides, dtype in get_batch_shape(batch)
        )
        return (
            f"batches come in more than {MOST_SHAPES} shapes (now {new}): only the first {MOST_SHAPES} are "
            "compiled, others run eagerly; one size for all, or padding to it, makes every step fast"
        )

    def forget(self) -> None:
        """Forget all shapes: batches are cut into other micro-batches from now on."""
        self.taken.clear()
        self.ready.clear()


def get_batch_shape(batch: Batch) -> BatchShape:
    """Return what must be equal for two batches to share compiled code."""
    return tuple(
        (name, tuple(value.shape), tuple(value.stride()), str(value.dtype).removeprefix("torch."))
        for name, value in sorted(batch.items())
    )


# --- why code could not be compiled ---

TOOL_ERROR = re.compile(r"\berror: |No space left on device")
"""Error lines of C++ compilers, assemblers and linkers, below pages of their command line."""
MOST_CHARACTERS = 400  # of the whole line: C++ templates have very long names


def explain_compile_error(error: Exception) -> str:
    """Return the first line of an error with its cause: a tool's error line, or the innermost exception."""
    first = summarise_error(error)
    tool_error = next((line.strip() for line in str(error).splitlines() if TOOL_ERROR.search(line)), "")
    found = tool_error or summarise_error(_find_root(error))
    reason = first if found in first else f"{first}: {found}"
    return reason if len(reason) <= MOST_CHARACTERS else f"{reason[:MOST_CHARACTERS]} ..."


def _find_root(error: BaseException) -> BaseException:
    """Return the innermost cause below the compiler's exceptions, except a failed command, which explains nothing."""
    below = error.__cause__ or error.__context__
    is_the_compilers = type(error).__module__.startswith("torch.")
    return _find_root(below) if below and is_the_compilers and not isinstance(below, CalledProcessError) else error


# --- the compiler's long warnings during a run, shortened to one line each: some code stays eager ---

SOURCES = ("torch._dynamo.convert_frame", "torch._dynamo.variables.tensor")
"""Loggers of the warnings below; a filter applies to its own logger only, not to child loggers."""

TOO_OFTEN = re.compile(
    r"torch\._dynamo hit config\.\w+ .*?last reason: (?:\S+: )?(?P<reason>[^\n]*?)(?: \(HINT|\n)", re.DOTALL
)
BREAK = re.compile(
    r"Graph break from (?P<what>`[^`]*`).*File \"(?P<file>[^\"]*)\", line (?P<line>\d+)[^\n]*\n *(?P<code>[^\n]*)",
    re.DOTALL,
)
MOST_QUOTED = 250  # of a reason, which quotes code


class CompilerWarnings:
    """Report each kind of warning once; with TORCH_LOGS the compiler's own output stays as well."""

    def __init__(self, say: Callable[[str], None]) -> None:
        # torch warns of a graph break once per process; a trial, whose warnings are dropped, may have used it up.
        if warned := getattr(
            TensorVariable, "_warn_capture_scalar_outputs", None
        ):  # a private attribute of torch, which may disappear
            warned.cache_clear()
        self._say = say
        self._said: set[re.Pattern[str]] = set()

    @contextmanager
    def shorten_warnings(self) -> Iterator[None]:
        loggers = [logging.getLogger(name) for name in SOURCES]
        for logger in loggers:
            logger.addFilter(self._filter)
        try:
            yield
        finally:
            for logger in loggers:
                logger.removeFilter(self._filter)

    def _filter(self, record: logging.LogRecord) -> bool:
        text = record.getMessage()
        if found := TOO_OFTEN.match(text):
            reason = " ".join(found["reason"].split())[:MOST_QUOTED]
            line = f"a function of the model was recompiled too often and now runs uncompiled: {reason}"
        elif found := BREAK.match(text):
            place = f"{found['file']}:{found['line']}: {found['code'].strip()}"[:MOST_QUOTED]
            line = f"compiled with graph breaks, which is slower: {found['what']} waits for the device at {place}"
        else:
            return True
        if found.re not in self._said:
            self._said.add(found.re)
            self._say(line)
        return bool(read_variable("TORCH_LOGS"))
