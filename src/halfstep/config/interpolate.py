"""`${globals.NAME}` anywhere: alone it keeps the type of the global, inside a text it is pasted.

Each global is resolved once, and all that references put in counts towards one limit: ten globals that each name the
one before ten times would otherwise fill the memory from a file of a kilobyte.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from halfstep.config.section import Plain
from halfstep.config.statements import Origin
from halfstep.errors import ConfigError, nearest

REFERENCE = re.compile(r"\$\{([^}]*)\}")
MAX_CHAIN = 20
"""Globals that refer to one another in a row: more is a mistake, and Python's stack has an end."""
MAX_GROWTH = 1_000_000
"""Characters and items that all references of one config may put in; real files need some hundreds."""


def references(value: object) -> set[str]:
    """The names of the globals this value refers to."""
    if isinstance(value, str):
        return {inner.strip().removeprefix("globals.") for inner in REFERENCE.findall(value)}
    if isinstance(value, Mapping):
        return set().union(*(references(item) for item in value.values())) if value else set()
    if isinstance(value, (list, tuple)):
        return set().union(*(references(item) for item in value)) if value else set()
    return set()


class Interpolation:
    """Replaces the references of one config; globals may refer to globals, not to themselves."""

    def __init__(self, globals_: Mapping[str, object]) -> None:
        self.globals = globals_
        self._resolved: dict[str, tuple[object, int]] = {}
        self._room = MAX_GROWTH

    def __call__(self, value: object, origin: Origin, chain: tuple[str, ...] = ()) -> object:
        """`value` with every reference replaced."""
        if isinstance(value, Mapping):
            return {key: self(item, origin, chain) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self(item, origin, chain) for item in value]
        if not isinstance(value, str) or "${" not in value:
            return value
        if alone := REFERENCE.fullmatch(value.strip()):
            return self._looked_up(alone[1], origin, chain)
        pasted = REFERENCE.sub(lambda match: str(self._looked_up(match[1], origin, chain)), value)
        if "${" in pasted:
            raise ConfigError(f"{value!r} ({origin}) has an open ${{", fix="write ${globals.NAME}")
        return Plain(pasted) if isinstance(value, Plain) else pasted

    def _looked_up(self, reference: str, origin: Origin, chain: tuple[str, ...]) -> object:
        section, _, name = reference.strip().partition(".")
        if section != "globals" or not name:
            raise ConfigError(
                f"${{{reference}}} ({origin}) is not a reference", fix="only ${globals.NAME} can be referred to"
            )
        if name not in self.globals:
            fix = nearest(name, self.globals) if self.globals else f"add `globals: {{{name}: …}}`"
            raise ConfigError(f"${{{reference}}} ({origin}): there is no global {name!r}", fix=fix)
        if name not in self._resolved:
            self._resolve(name, reference, origin, chain)
        value, size = self._resolved[name]
        self._room -= size
        if self._room < 0:
            raise ConfigError(
                f"${{{reference}}} ({origin}): references put in more than {MAX_GROWTH:,} characters",
                why=f"globals.{name} alone is {size:,} long once its own references are replaced",
                fix="let globals refer to fewer others",
            )
        return value

    def _resolve(self, name: str, reference: str, origin: Origin, chain: tuple[str, ...]) -> None:
        if name in chain:
            raise ConfigError(f"${{{reference}}} ({origin}) refers to itself", why=" -> ".join((*chain, name)))
        if len(chain) > MAX_CHAIN:
            raise ConfigError(
                f"${{{reference}}} ({origin}): more than {MAX_CHAIN} globals refer to one another in a row",
                why=" -> ".join((*chain, name)),
                fix="give some of them their value directly",
            )
        value = self(self.globals[name], origin, (*chain, name))
        self._resolved[name] = value, size_of(value)


def size_of(value: object) -> int:
    """Characters of texts and numbers, and one for each item of a list or a section."""
    if isinstance(value, Mapping):
        return 1 + sum(len(str(key)) + size_of(item) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return 1 + sum(size_of(item) for item in value)
    return len(str(value))
