"""Errors with what happened, why, and how to fix it.

Copied from halfstep, which this package does not need; halfstep's tests compare the two."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable


class HalfstepError(Exception):
    """A mistake that can be explained: `what` (with the value), `why`, and the `fix`."""

    exit_code = 2
    is_agreed = False
    """Whether every process of the run has it, so that it is not a single one's."""
    is_told: bool | None = None
    """Whether another process shows it; None where they have not agreed on that."""

    def __init__(self, what: str, *, why: str = "", fix: str = "") -> None:
        self.what, self.why, self.fix = make_printable(what), make_printable(why), make_printable(fix)
        super().__init__(self.what)

    def __str__(self) -> str:
        lines = [self.what]
        lines += [f"  why: {self.why}"] if self.why else []
        lines += [f"  fix: {self.fix}"] if self.fix else []
        return "\n".join(lines)

    def __reduce__(self) -> tuple[object, ...]:
        # Data errors travel from loader workers to the main process; keyword arguments must survive that.
        return _rebuild, (type(self), self.what, self.why, self.fix)


def make_printable(text: str) -> str:
    """Text as any screen, file or JSON takes it: of a file name that is not UTF-8, each odd byte as `\\xe9`."""
    try:
        text.encode()
    except UnicodeEncodeError:
        # Python reads such bytes as lone surrogates, which nothing but a file name may hold.
        return re.sub("[\ud800-\udfff]", _escape, text)
    return text


def _escape(found: re.Match[str]) -> str:
    code = ord(found.group())
    return f"\\x{code - 0xDC00:02x}" if 0xDC80 <= code <= 0xDCFF else f"\\u{code:04x}"


def _rebuild(kind: type[HalfstepError], what: str, why: str, fix: str) -> HalfstepError:
    return kind(what, why=why, fix=fix)


class ConfigError(HalfstepError):
    """A config file, flag or override that cannot be used."""


class HardwareError(HalfstepError):
    """The device cannot do what was asked of it."""


def suggest_nearest(name: str, valid: Iterable[str], *, count: int = 3) -> str:
    """`did you mean 'a' or 'b'?` for a mistyped name, or the valid ones when nothing is near."""
    names = list(valid)
    close = difflib.get_close_matches(name.lower(), names, n=count, cutoff=0.5)
    if close:
        return "did you mean " + " or ".join(repr(c) for c in close) + "?"
    return "one of " + ", ".join(names)
