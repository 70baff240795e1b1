"""`--show-config`: show every setting with its value, its source and its meaning."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.text import Text

from halfstep_train.config.dump import dump_values
from halfstep_train.config.load import Loaded
from halfstep_train.config.statements import DEFAULT, OPEN_SECTIONS, Origin, list_fields
from halfstep_train.report.console import print_text


def list_settings(loaded: Loaded) -> Iterator[tuple[str, object, Origin, str]]:
    """Yield key, value, origin and description of every setting, and of each key of an open section."""
    whole = dump_values(loaded.config)
    for path, field in list_fields(type(loaded.config)).items():
        value: Any = functools.reduce(operator.getitem, path.split("."), whole)
        is_open = path in OPEN_SECTIONS and value
        items = {f"{path}.{key}": item for key, item in value.items()} if is_open else {path: value}
        for key, item in items.items():
            yield key, item, loaded.origins.get(key, DEFAULT), field.description or ""


def dump_config(loaded: Loaded) -> dict[str, Any]:
    """Return every setting with value, source and description as plain data."""
    return {
        "settings": {
            key: {"value": value, "source": asdict(origin), "description": description}
            for key, value, origin, description in list_settings(loaded)
        },
        "overridden": [asdict(override) for override in loaded.overridden],
        "notes": list(loaded.notes),
        "warnings": list(loaded.warnings),
    }


def show_config(loaded: Loaded, console: Console) -> None:
    """Print every setting; those that were set are bold, defaults are dim."""
    for key, value, origin, description in list_settings(loaded):
        style = "dim" if origin.layer == "default" else "bold"
        line = escape(f"{key} = {format_setting(value)}  ({origin})")
        console.print(f"[{style}]{line}[/]\n    [dim]{escape(description)}[/]", highlight=False)
    for line in format_header(loaded):
        console.print(escape(line))
    for warning in loaded.warnings:
        print_text(console, Text(f"warning: {warning}", style="yellow"))


def format_header(loaded: Loaded) -> list[str]:
    """Return the lines about the config in a run's header: overridden settings and notes."""
    return [*(f"overridden: {override}" for override in loaded.overridden), *(f"note: {note}" for note in loaded.notes)]


def format_setting(value: object) -> str:
    """Format a value as in a config file."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(format_setting(item) for item in value)}]"
    return f"{value:g}" if isinstance(value, float) and value == float(f"{value:g}") else str(value)
