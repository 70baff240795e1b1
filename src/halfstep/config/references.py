"""`${...}` in a config file: alone it keeps the type of what it names, inside a text it is pasted.

Our own files name globals, `${globals.NAME}`. Those of other projects are OmegaConf's: `${trainer.max_steps}` names any
key, `${.NUM_GPUS}` one beside it. Both may compute, `${mul: a, b}`. Everything has a limit: ten keys that each name the
one before ten times would otherwise fill the memory from a file of a kilobyte.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from halfstep.config.arithmetic import counted_by
from halfstep.config.section import Plain
from halfstep.errors import ConfigError

INNERMOST = re.compile(r"\$\{([^${}]*)\}")
MOST_IN_A_ROW = 20
"""Keys that name one another: more is a mistake, and Python's stack has an end."""
MOST_LOOKUPS = 10_000
MOST_CHARACTERS = 100_000
"""Of one text; real files need some hundreds."""

Place = tuple[str, ...]
Find = Callable[[str, Place, str], tuple[Any, Place]]
"""(name, where it was read, the same for an error) -> what it names, and where that stands."""


def names_in(value: object) -> set[str]:
    """What this value refers to."""
    if isinstance(value, str):
        return {inner.strip() for inner in INNERMOST.findall(value)}
    inside = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    return set().union(*map(names_in, inside))


class References:
    """Replaces the references of one config, each read where it stands."""

    def __init__(self, find: Find, read: Callable[[str], Any] = lambda text: text) -> None:
        self.find, self.read = find, read
        self._num_looked_up = 0

    def __call__(self, value: Any, place: Place, at: str = "", chain: Place = ()) -> Any:
        """`value`, which stands at `place`, with every reference replaced; `at` names it in errors."""
        if isinstance(value, Mapping):
            return {key: self(item, (*place, key), at, chain) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self(item, place, at, chain) for item in value]
        if not isinstance(value, str):
            return value
        return self._replaced(value, place, at or ".".join(place), chain) if "${" in value else self.read(value)

    def _replaced(self, given: str, place: Place, at: str, chain: Place) -> Any:
        """From the innermost reference outwards."""
        text = str(given)
        while match := INNERMOST.search(text):
            value = self._looked_up(match[1].strip(), place, at, chain)
            if match.span() == (0, len(text)):
                return value
            if isinstance(value, (list, Mapping)):
                raise ConfigError(f"{at}: ${{{match[1]}}} is not a single value and cannot stand in a text")
            text = text[: match.start()] + ("null" if value is None else str(value)) + text[match.end() :]
            if len(text) > MOST_CHARACTERS:
                raise ConfigError(f"{at} is a text of more than {MOST_CHARACTERS:,} characters", fix="write it shorter")
        if "${" in text:
            raise ConfigError(f"{at}: {text[:60]!r} has an open ${{", fix="close it with }")
        return self.read(Plain(text) if isinstance(given, Plain) else text)

    def _looked_up(self, reference: str, place: Place, at: str, chain: Place) -> Any:
        self._num_looked_up += 1
        if self._num_looked_up > MOST_LOOKUPS:
            here = f"{at}: ${{{reference}}} is one of more than {MOST_LOOKUPS:,} references"
            raise ConfigError(here, fix="let keys name fewer others")
        name, is_function, arguments = reference.partition(":")
        if is_function:
            return counted_by(name.strip(), arguments, at)
        found, there = self.find(name, place, at)
        named = ".".join(there)
        if named in chain or len(chain) >= MOST_IN_A_ROW:
            what = "refers to itself" if named in chain else f"is one of more than {MOST_IN_A_ROW} references in a row"
            why = " -> ".join((*chain, named))
            raise ConfigError(f"{at}: ${{{reference}}} {what}", why=why, fix="give one of them a value of its own")
        return self(found, there, at, (*chain, named))
