"""The base of every part of a config, and the number types its fields use."""

from __future__ import annotations

import os
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, WithJsonSchema, field_validator

from halfstep.config.scalars import atoms


def zero_when_off(value: object) -> object:
    """`null` and `false` say off, and so does 0 in the fields that use this."""
    return 0 if value is None or value is False else value


OffCount = Annotated[int, Field(ge=0), BeforeValidator(zero_when_off)]
"""A count where 0 means off."""
OffNumber = Annotated[float, Field(ge=0), BeforeValidator(zero_when_off)]
"""A number where 0 means off."""
Fraction = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0)]
PositiveCount = Annotated[int, Field(ge=1)]


class Section(BaseModel):
    """One part of a config."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, validate_default=True)

    @field_validator("*", mode="before")
    @classmethod
    def no_bool_as_number(cls, value: object, info: ValidationInfo) -> object:
        """`epochs: yes` is a mistake, not one epoch; null and false reach the fields where they mean off."""
        field = cls.model_fields[info.field_name or ""]
        kinds = atoms(field.annotation)
        means_off = value is False and any(isinstance(item, BeforeValidator) for item in field.metadata)
        if isinstance(value, bool) and not means_off and bool not in kinds and kinds & {int, float}:
            raise ValueError("expected a number, not true or false")
        return value


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
