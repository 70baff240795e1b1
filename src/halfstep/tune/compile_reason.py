"""Why code could not be compiled, in one line. The compiler's own first line often names only the stage it was in."""

from __future__ import annotations

import re
from subprocess import CalledProcessError

from halfstep.tune.memory_limit import first_line

OF_A_TOOL = re.compile(r"\berror: |No space left on device")
"""How a C++ compiler, an assembler or a linker says what it could not do, below pages of its command."""
MOST_CHARACTERS = 400
"""Of the whole line: templates of C++ have names without end."""


def compile_reason(error: Exception) -> str:
    """The first line, and what lies below it: a tool's own complaint, or the error that all began with."""
    first = first_line(error)
    found = _of_a_tool(str(error)) or first_line(_root(error))
    reason = first if found in first else f"{first}: {found}"
    return reason if len(reason) <= MOST_CHARACTERS else f"{reason[:MOST_CHARACTERS]} ..."


def _of_a_tool(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if OF_A_TOOL.search(line)), "")


def _root(error: BaseException) -> BaseException:
    """The first below the compiler's own errors, which hide it; a command that failed says nothing but itself."""
    below = error.__cause__ or error.__context__
    is_the_compilers = type(error).__module__.startswith("torch.")
    return _root(below) if below and is_the_compilers and not isinstance(below, CalledProcessError) else error
