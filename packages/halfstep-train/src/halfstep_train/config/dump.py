"""Write a config as YAML that loads back to the same config, and its JSON schema for editors."""

from __future__ import annotations

import json
from typing import Any

import yaml

from halfstep_train.config.schema import RunConfig
from halfstep_train.config.section import parse_scalar

SHORTHANDS = ("precision", "optimizer", "schedule", "model", "data", "ema")
"""Sections that accept a single value: `precision: bf16`, `optimizer: sgd`, `ema: true`."""
TEXT = "tag:yaml.org,2002:str"
REFERENCE = {"type": "string", "pattern": r"\$\{globals\..+\}"}


# PyYAML's wheels include libyaml, which is four times as fast at writing.
class Dumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]
    """Writes YAML for our loader, which types plain scalars itself: text that looks like a number is quoted."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, Any]]] = {}

    def ignore_aliases(self, data: object) -> bool:
        return True


def represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    is_plain = isinstance(parse_scalar(text), str) and text == text.strip() and text.isprintable() and text != "<<"
    return dumper.represent_scalar(TEXT, text, style=None if is_plain else '"')


def represent_plain(dumper: yaml.SafeDumper, value: object) -> yaml.ScalarNode:
    # json writes a float as the shortest text that reads back to the same bits.
    return dumper.represent_scalar(TEXT, json.dumps(value))


Dumper.add_representer(str, represent_text)
for kind in (bool, int, float, type(None)):
    Dumper.add_representer(kind, represent_plain)


def to_yaml(config: RunConfig) -> str:
    """Return the whole config as YAML, defaults included: a run stores it, so that later defaults cannot change it."""
    return yaml.dump(
        dump_values(config), Dumper=Dumper, sort_keys=False, default_flow_style=False, width=120, allow_unicode=True
    )


def dump_values(config: RunConfig) -> dict[str, Any]:
    return config.model_dump(mode="json")


def make_json_schema(config: type[RunConfig]) -> dict[str, Any]:
    """Return the JSON schema of config files, which accepts shorthands and `${globals.NAME}`."""
    schema = config.model_json_schema()
    # A reference may replace any value, so every field also accepts one.
    for definition in schema["$defs"].values():
        fields = definition.get("properties", {})
        fields |= {name: allow_reference(field) for name, field in fields.items()}
    for name in SHORTHANDS:
        section = schema["properties"][name]
        schema["properties"][name] = {"anyOf": [section, {"type": ["string", "integer", "boolean", "null"]}]}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def allow_reference(field: dict[str, Any]) -> dict[str, Any]:
    """Let a field also accept a reference; text fields already do."""
    # Any text is valid there, so a reference is too; `$ref` is a section.
    if field.get("type") == "string" and "enum" not in field or "$ref" in field:
        return field
    outer = {key: value for key, value in field.items() if key in ("title", "description", "default")}
    inner = {key: value for key, value in field.items() if key not in outer}
    return {**outer, "anyOf": [inner, REFERENCE]}
