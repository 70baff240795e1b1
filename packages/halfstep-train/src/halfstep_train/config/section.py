"""The base class of config sections, the number types of their fields, and the conversion of plain text to values.

YAML 1.1 reads `1e-5` as text, `010` as 8 and `1:30` as 90. halfstep reads numbers the way people write them, in YAML
and in `key=value` overrides alike. The meaning of a text may depend on its field (`off` is text for `train.fast` and a
bool for `ema.enabled`), so unquoted text stays `Plain` until its field is known.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator

Kind = TypeVar("Kind")
DIGITS = r"\d+(_\d+)*"
INTEGER = re.compile(rf"[-+]?{DIGITS}", re.ASCII)
FLOAT = re.compile(rf"[-+]?(({DIGITS})?\.{DIGITS}|{DIGITS}\.?)(e[-+]?\d+)?|[-+]?\.?(inf|nan)", re.ASCII)
LONGEST_NUMBER = 400
"""In characters; the longest float has 309 digits before its point."""
NULLS = {"", "~", "null", "none"}
BOOLS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


class Plain(str):
    """Unquoted text whose type is not yet decided."""

    __slots__ = ()


def parse_scalar(text: str) -> object:
    """Convert `3` to an int, `1e-5` to a float, `no` to a bool, `null` to None; everything else stays text."""
    word = text.strip().lower()
    if word in NULLS:
        return None
    if word in BOOLS:
        return BOOLS[word]
    if len(word) > LONGEST_NUMBER:
        return str(text)
    if INTEGER.fullmatch(word):
        return int(word)
    if FLOAT.fullmatch(word):
        return float(word.replace(".inf", "inf").replace(".nan", "nan"))
    return str(text)


def convert_for_field(value: object, annotation: Any) -> object:
    """Convert every `Plain` in `value` to what a field of this annotation expects."""
    if isinstance(value, Plain):
        is_off = "off" in get_args(annotation) and (value.lower() in NULLS or BOOLS.get(value.lower()) is False)
        if is_off:  # in a choice among texts, `false` and `no` mean the choice `off`
            return "off"
        # A text field keeps `007` and `no` as text; only null still means None where the field allows it.
        types = list_types(annotation)
        keeps_text = types <= {str, type(None)} and not (value.lower() in NULLS and type(None) in types)
        return str(value) if keeps_text else parse_scalar(value)
    if isinstance(value, Mapping):
        return {key: convert_for_field(item, annotation) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [convert_for_field(item, annotation) for item in value]
    return value


def list_types(annotation: Any) -> set[object]:
    """Return the innermost types of an annotation: str and NoneType for `tuple[str, ...] | None`."""
    if get_origin(annotation) is Literal:
        return {type(choice) for choice in get_args(annotation)}
    args = get_args(annotation)
    # Annotated[int, ...]: the first argument is the type, the others are metadata.
    inner = args[:1] if get_origin(annotation) is Annotated else [arg for arg in args if arg is not Ellipsis]
    return set().union(*(list_types(arg) for arg in inner)) if inner else {annotation}


def read_off_as_zero(value: object) -> object:
    """Convert `null` and `false` to 0, which means off in the fields that use this."""
    return 0 if value is None or value is False else value


LARGEST_COUNT = 10**12
"""Larger counts are mistakes, and torch cannot take numbers of more than 64 bits."""
OffCount = Annotated[int, Field(ge=0, le=LARGEST_COUNT), BeforeValidator(read_off_as_zero)]
"""A count where 0 means off."""
OffNumber = Annotated[float, Field(ge=0), BeforeValidator(read_off_as_zero)]
"""A number where 0 means off."""
Fraction = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0)]
IS_PATH = "path"
"""Marks a setting that names a file or folder: a run stores it as an absolute path."""
MAY_BE_MISSING = "may be missing"
"""Marks a path that a run creates if it does not exist."""
FilePath = Annotated[str | None, IS_PATH]
NamedPath = Annotated[Annotated[str, Field(min_length=1)] | None, IS_PATH]
CachePath = Annotated[NamedPath, MAY_BE_MISSING]
PositiveCount = Annotated[int, Field(ge=1, le=LARGEST_COUNT)]


def setting(default: Any, description: str, **limits: Any) -> Any:
    """Declare a setting by its default and its description, because every setting has both."""
    return Field(default=default, description=description, **limits)


class Section(BaseModel):
    """One section of a config."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, validate_default=True)

    @field_validator("*", mode="before")
    @classmethod
    def refuse_bool_as_number(cls, value: object, info: ValidationInfo) -> object:
        """Refuse `epochs: yes`, which is not one epoch; null and false reach the fields where they mean off."""
        field = cls.model_fields[info.field_name or ""]
        kinds = list_types(field.annotation)
        # Fields with a BeforeValidator (OffCount, OffNumber, Workers) read false as 0.
        means_off = value is False and any(isinstance(item, BeforeValidator) for item in field.metadata)
        # bool is a subclass of int, so pydantic would read true as 1.
        if isinstance(value, bool) and not means_off and bool not in kinds and kinds & {int, float}:
            raise ValueError("expected a number, not true or false")
        return value


def fill_from_settings(kind: type[Kind], section: Section, **more: Any) -> Kind:
    """Fill a dataclass from the settings of the same names; `more` holds the fields without a setting."""
    names = {field.name for field in dataclasses.fields(kind)} & type(section).model_fields.keys()  # type: ignore[arg-type]
    return kind(**{name: getattr(section, name) for name in names} | more)


MOST = 8
"""Most workers that `auto` starts: more pay off only if decoding is slow, and each takes memory."""


def count_cores() -> int:
    """Return the number of cores this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)  # not on macOS and Windows
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def read_worker_count(value: object) -> object:
    return min(count_cores(), MOST) if value == "auto" else read_off_as_zero(value)


Workers = Annotated[int, Field(ge=0), BeforeValidator(read_worker_count)]
"""A number of processes, 0 for none, or `auto`."""
