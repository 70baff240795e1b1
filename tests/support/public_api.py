"""The public API as text, one line per name, parameter list, option and setting.

    python tests/support/public_api.py > tests/public_api.txt

CONTRIBUTING.md ("Versions") says what a change of a line means for the next version.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import typer.main

import halfstep
from halfstep_train.cli.main import COMMANDS, build_app
from halfstep_train.config.schema import RunConfig
from halfstep_train.config.statements import list_fields
from halfstep_train.workloads import KINDS

DATA_METHODS = ("__call__", "__iter__", "__enter__", "__exit__")


def list_public_api() -> Iterator[str]:
    for name in sorted(set(halfstep.__all__) - {"__version__"}):
        yield from describe_name(f"hs.{name}", getattr(halfstep, name))
    for command in COMMANDS:
        yield from describe_command(command)
    yield from describe_settings()


def describe_name(name: str, value: Any) -> Iterator[str]:
    """Describe a function by its parameters, a class also by its public methods and attributes."""
    if inspect.ismodule(value):  # of the integrations, whose packages may not be installed
        yield from (f"{name}.{member}" for member in sorted(value.__all__))
        return
    yield f"{name}{describe_parameters(value)}"
    if not inspect.isclass(value) or issubclass(value, Exception):
        return
    for member in sorted(dir(value)):
        if member.startswith("_") and member not in DATA_METHODS:
            continue
        found = inspect.getattr_static(value, member)
        if inspect.isfunction(found):
            yield f"{name}.{member}{describe_parameters(found)}"
        elif member not in DATA_METHODS:
            yield f"{name}.{member}"


def describe_parameters(value: Any) -> str:
    """Return the names of the parameters, with `=` behind those that have a default: `(model, optimizer, fast=)`."""
    parts, is_keyword = [], False
    for parameter in inspect.signature(value).parameters.values():
        if parameter.name == "self":
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not is_keyword:
            is_keyword = True
            parts.append("*")
        stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        parts.append(stars + parameter.name + ("" if parameter.default is parameter.empty else "="))
    return f"({', '.join(parts)})"


def describe_command(name: str) -> Iterator[str]:
    """Describe a command by its arguments and options."""
    group: Any = typer.main.get_command(build_app([name]))
    for parameter in group.commands[name].params:
        if parameter.param_type_name == "argument":
            yield f"halfstep {name} {parameter.metavar or parameter.name}"
        else:
            yield f"halfstep {name} {' '.join((*parameter.opts, *parameter.secondary_opts))}"


def describe_settings() -> Iterator[str]:
    """Describe the settings of all workloads, then those that a workload has in addition."""
    common = set(list_fields(RunConfig))
    yield from (f"setting {path}" for path in sorted(common))
    schemas = {KINDS[name].get_schema(name): name for name in reversed(list(KINDS))}
    for schema, name in reversed(schemas.items()):
        yield from (f"setting of {name} {path}" for path in sorted(set(list_fields(schema)) - common))


if __name__ == "__main__":
    print("\n".join(list_public_api()))
