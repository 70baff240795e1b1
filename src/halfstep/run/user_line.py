"""Warnings of a loop of one's own point at the user's line, however deep in the package they arise."""

from __future__ import annotations

import contextlib
import sys
import warnings
from pathlib import Path

import halfstep

OURS = (str(Path(halfstep.__file__).parent), contextlib.__file__)
"""Files whose lines a user cannot change; ours leave `with` blocks through contextlib's."""


def warn_user(text: str) -> None:
    level, frame = 1, sys._getframe(0)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(OURS):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, stacklevel=level)
