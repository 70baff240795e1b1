"""pydantic's complaints as our errors: key path, value, where it came from, what was expected."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from halfstep.config.keys import field_at, fields_of
from halfstep.config.section import Section
from halfstep.config.statements import Statement
from halfstep.errors import ConfigError

EXPECTED = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "string": "text",
    "tuple": "a list",
    "dict": "settings of its own",
    "finite": "a finite number",
}
"""What was expected, by the first word of pydantic's error type."""
NEXT_LINE = "\n" + " " * len("error: ")
"""Several settings, one below the other, where `error: ` and `  fix: ` stand in front of the first."""
BOUNDS = {
    "greater_than": ("more than", "gt"),
    "greater_than_equal": ("at least", "ge"),
    "less_than": ("less than", "lt"),
    "less_than_equal": ("at most", "le"),
}


def as_config_error(error: ValidationError, said: Mapping[str, Statement], schema: type[Section]) -> ConfigError:
    """One error for all that is wrong, each setting on a line of its own."""
    details: dict[str, list[ErrorDetails]] = {}
    for detail in error.errors():
        details.setdefault(setting_at(detail["loc"], said, schema), []).append(detail)
    lines = [f"{described(path, said)}: {complaint(details[path])}" for path in details]
    known = [path for path in details if path in fields_of(schema)]
    return ConfigError(NEXT_LINE.join(lines), fix=NEXT_LINE.join(remedy(path, details[path], schema) for path in known))


def remedy(path: str, details: list[ErrorDetails], schema: type[Section]) -> str:
    """`set train.epochs (passes over the training set) to at least 1; its default is 100`."""
    field = field_at(schema, path)
    meaning = field.description or ""
    is_word = meaning[1:2].islower()  # NHWC and TF32 keep their capitals
    named = f"{path} ({meaning[:1].lower() + meaning[1:] if is_word else meaning})"
    change = f"leave out {named}" if details[0]["type"] == "value_error" else f"set {named} to {wanted(details)}"
    has_default = not field.is_required() and field.default not in (None, "", ())
    return f"{change}; its default is {field.default}" if has_default else change


def wanted(details: list[ErrorDetails]) -> str:
    return " or ".join(dict.fromkeys(expected(detail) for detail in details))


def setting_at(loc: tuple[int | str, ...], said: Mapping[str, Statement], schema: type[Section]) -> str:
    """The setting an error location lies in: pydantic adds list positions and union members behind it."""
    paths = [".".join(str(part) for part in loc[:length]) for length in range(len(loc), 0, -1)]
    return next((path for path in paths if path in said or path in fields_of(schema)), paths[0] if paths else "config")


def described(path: str, said: Mapping[str, Statement]) -> str:
    """`train.epochs = 'x' (unet.yaml:3)`; for a whole section, everything that was said of it."""
    if path not in said:
        inside = [str(said[key]) for key in said if key.startswith(f"{path}.")]
        return f"{path} ({', '.join(inside)})" if inside else path
    statement = said[path]
    origin = statement.origin
    other_key = origin.layer in ("file", "preset") and origin.key != path
    return f"{path} = {statement.value!r} ({origin}{f', as {origin.key}' if other_key else ''})"


def complaint(details: list[ErrorDetails]) -> str:
    if details[0]["type"] == "value_error":
        return str(details[0]["ctx"]["error"])
    return f"expected {wanted(details)}"


def expected(detail: ErrorDetails) -> str:
    kind, context = detail["type"], detail.get("ctx", {})
    if kind in BOUNDS:
        words, bound = BOUNDS[kind]
        return f"{words} {context[bound]:g}"
    if kind == "literal_error":
        return str(context["expected"])
    if kind == "too_long":
        return f"a list of {context['max_length']} values"
    if kind == "string_unicode":
        return "a name in UTF-8; rename the folder, or link to it: ln -s OLD NEW"
    if kind == "string_too_short":
        return "text that is not empty"
    if kind == "missing":
        return "one more value"
    return EXPECTED.get(kind.split("_")[0], detail["msg"])
