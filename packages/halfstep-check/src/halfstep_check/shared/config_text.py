"""Text of config files: YAML as nodes with positions, numbers as people write them, JSON.

Copied from halfstep, which this package does not need; halfstep's tests compare the two."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml

from halfstep_check.shared.errors import ConfigError

MAX_NODES = 20_000
MAX_DEPTH = 40


class NodeLoader(yaml.SafeLoader):
    """Compose nodes without resolving types: every plain scalar stays the text that was written."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, Any]]] = {}


def compose_node(text: str, name: str) -> yaml.Node | None:
    """Parse a text into PyYAML's nodes; an error names line and column."""
    try:
        node: yaml.Node | None = yaml.compose(text, Loader=NodeLoader)
        return node
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        at = f"line {mark.line + 1}, column {mark.column + 1}" if mark else "an unknown position"
        problem = " ".join(part for part in (error.context, error.problem) if part)
        raise ConfigError(f"{name}: bad YAML at {at}: {problem}", fix=suggest_yaml_fix(problem, text)) from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{name}: bad YAML: {' '.join(str(error).split())}", fix="save it as plain text") from error
    except RecursionError:
        raise ConfigError(
            f"{name}: nested too deeply", why=f"more than {MAX_DEPTH} levels", fix="use fewer levels"
        ) from None


def suggest_yaml_fix(problem: str, text: str) -> str:
    if "${" in text and "flow" in problem:
        return 'quote a reference inside { } or [ ]: "${globals.NAME}"'
    if "\n" not in text:
        return "close every quote and bracket"
    if "\\t" in problem:
        return "indent with spaces, not tabs"
    if "mapping values are not allowed" in problem:
        return "quote a value that contains `: `, and check the indentation"
    return "check the line above as well: a missing colon, quote or bracket is often there"


def decode_text(content: bytes, path: Path) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise ConfigError(
            f"{path}:{line}: byte {content[error.start]:#04x} is not UTF-8 text", fix="save the file as UTF-8"
        ) from error


DIGITS = r"\d+(_\d+)*"
INTEGER = re.compile(rf"[-+]?{DIGITS}", re.ASCII)
FLOAT = re.compile(rf"[-+]?(({DIGITS})?\.{DIGITS}|{DIGITS}\.?)(e[-+]?\d+)?|[-+]?\.?(inf|nan)", re.ASCII)
LONGEST_NUMBER = 400
"""Characters; the longest float has 309 digits before its point."""
NULLS = {"", "~", "null", "none"}
BOOLS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


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


def parse_json(text: str | bytes) -> Any:
    """Parse JSON; nesting too deep for Python's stack is a ValueError, like any other damage."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


IMPORT_PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


def is_import_path(name: str) -> bool:
    """True if this is the import path of a custom workload, `my_pkg.my_mod:build`."""
    return IMPORT_PATH.fullmatch(name) is not None
