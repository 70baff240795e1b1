"""How many processes read the data where nobody says it: one a core, within reason."""

from __future__ import annotations

import os
from typing import Annotated

from pydantic import BeforeValidator, Field, WithJsonSchema

from halfstep.config.section import zero_when_off

MOST = 8
"""More pay only where decoding is slow; each holds a copy of the interpreter and its own batches."""


def num_cores() -> int:
    """Cores this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)  # not on macOS and Windows
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def auto_workers() -> int:
    """What `auto` stands for on this machine."""
    return min(num_cores(), MOST)


def as_count(value: object) -> object:
    return auto_workers() if value == "auto" else zero_when_off(value)


Workers = Annotated[
    int,
    Field(ge=0),
    BeforeValidator(as_count),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 0}, {"const": "auto"}]}),
]
"""A number of processes, 0 for none, or `auto`."""
