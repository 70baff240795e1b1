"""Write a config as YAML that loads back to the same config."""

from __future__ import annotations

import json
from typing import Any

import yaml

from halfstep_train.config.schema import RunConfig
from halfstep_train.config.section import parse_scalar

TEXT = "tag:yaml.org,2002:str"


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
