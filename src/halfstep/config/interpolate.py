"""`${globals.NAME}` anywhere: alone it keeps the type of the global, inside a text it is pasted."""

from __future__ import annotations

import re
from collections.abc import Mapping

from halfstep.config.scalars import Plain
from halfstep.config.statements import Source
from halfstep.errors import ConfigError, nearest

REFERENCE = re.compile(r"\$\{([^}]*)\}")
MAX_CHAIN = 20


def references(value: object) -> set[str]:
    """The names of the globals this value refers to."""
    if isinstance(value, str):
        return {inner.strip().removeprefix("globals.") for inner in REFERENCE.findall(value)}
    if isinstance(value, Mapping):
        return set().union(*(references(item) for item in value.values())) if value else set()
    if isinstance(value, (list, tuple)):
        return set().union(*(references(item) for item in value)) if value else set()
    return set()


def interpolated(value: object, globals_: Mapping[str, object], source: Source, chain: tuple[str, ...] = ()) -> object:
    """`value` with every reference replaced; globals may refer to globals, not to themselves."""
    if isinstance(value, Mapping):
        return {key: interpolated(item, globals_, source, chain) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [interpolated(item, globals_, source, chain) for item in value]
    if not isinstance(value, str) or "${" not in value:
        return value
    if alone := REFERENCE.fullmatch(value.strip()):
        return looked_up(alone[1], globals_, source, chain)
    pasted = REFERENCE.sub(lambda match: str(looked_up(match[1], globals_, source, chain)), value)
    if "${" in pasted:
        raise ConfigError(f"{value!r} ({source}) has an open ${{", fix="write ${globals.NAME}")
    return Plain(pasted) if isinstance(value, Plain) else pasted


def looked_up(reference: str, globals_: Mapping[str, object], source: Source, chain: tuple[str, ...]) -> object:
    section, _, name = reference.strip().partition(".")
    if section != "globals" or not name:
        raise ConfigError(
            f"${{{reference}}} ({source}) is not a reference", fix="only ${globals.NAME} can be referred to"
        )
    if name not in globals_:
        fix = nearest(name, globals_) if globals_ else f"add `globals: {{{name}: …}}`"
        raise ConfigError(f"${{{reference}}} ({source}): there is no global {name!r}", fix=fix)
    if name in chain or len(chain) > MAX_CHAIN:
        raise ConfigError(f"${{{reference}}} ({source}) refers to itself", why=" -> ".join((*chain, name)))
    return interpolated(globals_[name], globals_, source, (*chain, name))
