"""Plain text to typed values: one rule for YAML scalars and for `key=value` overrides.

YAML 1.1 reads `1e-5` as text, `010` as 8 and `1:30` as 90. Here a number is what a person calls a number.
What a text means may depend on where it stands (`off` is a word for `train.fast` and a bool for `ema.enabled`),
so unquoted text stays `Plain` until its field is known.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args, get_origin

DIGITS = r"\d+(_\d+)*"
INTEGER = re.compile(rf"[-+]?{DIGITS}", re.ASCII)
FLOAT = re.compile(rf"[-+]?(({DIGITS})?\.{DIGITS}|{DIGITS}\.?)(e[-+]?\d+)?|[-+]?\.?(inf|nan)", re.ASCII)
LONGEST_NUMBER = 400
"""Characters; the longest float has 309 digits before its point."""
NULLS = {"", "~", "null", "none"}
BOOLS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


class Plain(str):
    """Unquoted text whose type is still open."""

    __slots__ = ()


def typed(text: str) -> object:
    """`3` is an int, `1e-5` a float, `no` a bool, `null` None; everything else is text."""
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


def typed_by_field(value: object, annotation: Any) -> object:
    """`value` with every `Plain` inside turned into what a field of this annotation expects."""
    if isinstance(value, Plain):
        keeps_text = is_text_only(annotation) and not (value.lower() in NULLS and type(None) in atoms(annotation))
        return str(value) if keeps_text else typed(value)
    if isinstance(value, Mapping):
        return {key: typed_by_field(item, annotation) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [typed_by_field(item, annotation) for item in value]
    return value


def is_text_only(annotation: Any) -> bool:
    """Whether nothing but text (or None) can stand in a field of this annotation."""
    return atoms(annotation) <= {str, type(None)}


def atoms(annotation: Any) -> set[object]:
    """The innermost types of an annotation: `tuple[str, ...] | None` has str and NoneType."""
    if get_origin(annotation) is Literal:
        return {type(choice) for choice in get_args(annotation)}
    args = get_args(annotation)
    inner = args[:1] if get_origin(annotation) is Annotated else [arg for arg in args if arg is not Ellipsis]
    return set().union(*(atoms(arg) for arg in inner)) if inner else {annotation}
