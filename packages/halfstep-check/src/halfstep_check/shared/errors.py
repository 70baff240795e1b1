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
    """True if every rank raises the same error."""
    is_shown_elsewhere: bool | None = None
    """True if another rank prints the error; None if the ranks have not agreed on that."""

    def __init__(self, what: str, *, why: str = "", fix: str = "") -> None:
        self.what, self.why, self.fix = make_printable(what), make_printable(why), make_printable(fix)
        super().__init__(self.what)

    def __str__(self) -> str:
        lines = [self.what]
        lines += [f"  why: {self.why}"] if self.why else []
        lines += [f"  fix: {self.fix}"] if self.fix else []
        return "\n".join(lines)

    def __reduce__(self) -> tuple[object, ...]:
        # Loader workers pickle data errors to the main process; keyword arguments must survive that.
        return _rebuild, (type(self), self.what, self.why, self.fix)


UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


def make_printable(text: str) -> str:
    """Return text that any terminal, file or JSON accepts: bytes of a file name that are not UTF-8 become `\\xe9`, and
    control characters of a file's contents `\\x1b`, so that they do not steer the terminal."""
    return UNPRINTABLE.sub(_escape, text)


def _escape(found: re.Match[str]) -> str:
    # Python decodes bytes that are not UTF-8 as lone surrogates, which cannot be encoded again except in a file name.
    code = ord(found.group())
    code = code - 0xDC00 if 0xDC80 <= code <= 0xDCFF else code
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def _rebuild(kind: type[HalfstepError], what: str, why: str, fix: str) -> HalfstepError:
    return kind(what, why=why, fix=fix)


class ConfigError(HalfstepError):
    """A config file, flag or override that cannot be used."""


class HardwareError(HalfstepError):
    """The device cannot do what was asked of it."""


def suggest_nearest(name: str, valid: Iterable[str], *, count: int = 3) -> str:
    """Return `did you mean 'a' or 'b'?` for a mistyped name, or list the valid ones if none is similar."""
    names = list(valid)
    lowered = {one.lower(): one for one in names}
    close = difflib.get_close_matches(name.lower(), lowered, n=count, cutoff=0.5)
    if close:
        return "did you mean " + " or ".join(repr(lowered[one]) for one in close) + "?"
    return "one of " + ", ".join(names)
