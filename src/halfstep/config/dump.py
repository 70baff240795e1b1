"""A config as YAML that loads back to the very same config, and its JSON schema for editors."""

from __future__ import annotations

from typing import Any

import yaml

from halfstep.config.scalars import typed
from halfstep.config.schema import RunConfig
from halfstep.config.workloads import schema_for

SHORTHANDS = ("precision", "optimizer", "schedule", "model", "data", "ema")
"""Sections that one value may stand for: `precision: bf16`, `optimizer: sgd`, `ema: true`."""
REFERENCE = {"type": "string", "pattern": r"\$\{globals\..+\}"}


class Dumper(yaml.SafeDumper):
    """Quotes every text that our loader would read as something else."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    is_plain = isinstance(typed(text), str) and text == text.strip()
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if is_plain else '"')


def represent_number(dumper: yaml.SafeDumper, number: float) -> yaml.ScalarNode:
    # repr is the shortest text that reads back to the same bits.
    return dumper.represent_scalar("tag:yaml.org,2002:float", repr(number))


Dumper.add_representer(str, represent_text)
Dumper.add_representer(float, represent_number)


def to_yaml(config: RunConfig) -> str:
    """The whole config, defaults included: what a run stores, so that later defaults cannot change it."""
    return yaml.dump(
        plain(config), Dumper=Dumper, sort_keys=False, default_flow_style=False, width=120, allow_unicode=True
    )


def plain(config: RunConfig) -> dict[str, Any]:
    return config.model_dump(mode="json")


def json_schema(workload: str) -> dict[str, Any]:
    """The JSON schema of a workload's config file: shorthands and `${globals.NAME}` are valid in it."""
    schema = schema_for(workload).model_json_schema()
    for definition in schema["$defs"].values():
        definition["properties"] = {name: or_reference(value) for name, value in definition["properties"].items()}
    for name in SHORTHANDS:
        section = schema["properties"][name]
        schema["properties"][name] = {"anyOf": [section, {"type": ["string", "integer", "boolean", "null"]}]}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def or_reference(field: dict[str, Any]) -> dict[str, Any]:
    """A field that also takes a reference; text fields do so anyway."""
    if field.get("type") == "string" and "enum" not in field or "$ref" in field:
        return field
    outer = {key: value for key, value in field.items() if key in ("title", "description", "default")}
    inner = {key: value for key, value in field.items() if key not in outer}
    return {**outer, "anyOf": [inner, REFERENCE]}
