"""Replace `${...}` in config files: alone it keeps the type of the value it names, inside a text it is pasted.

halfstep's files refer to globals only, `${globals.NAME}`. Files of other projects follow OmegaConf:
`${trainer.max_steps}` names any key and `${.NUM_GPUS}` one in the same section. Both may multiply: `${mul: a, b}`.

The number of references is bounded. Without a bound a file of one kilobyte could fill the memory: ten keys, each of
which names the previous one ten times, expand to 10^10 values.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from halfstep.errors import ConfigError
from halfstep_train.config.section import Plain, parse_scalar

INNERMOST = re.compile(r"\$\{([^${}]*)\}")
MOST_IN_A_ROW = 20
"""Longest chain of references that lead to one another: a longer one is a mistake, and Python's stack is finite."""
MOST_LOOKUPS = 10_000

Place = tuple[str, ...]
Find = Callable[[str, Place, str], tuple[Any, Place]]
"""Arguments: the name, the path at which it is used, that path for errors. Returns its value and the value's path."""


def find_references(value: object) -> set[str]:
    """Return the references in this value."""
    if isinstance(value, str):
        return {inner.strip() for inner in INNERMOST.findall(value)}
    inside = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    return set().union(*map(find_references, inside))


class References:
    """Replaces the references of one config, each relative to the path at which it is used."""

    def __init__(self, find: Find, read: Callable[[str], Any] = lambda text: text) -> None:
        self.find, self.read = find, read
        self._num_looked_up = 0

    def __call__(self, value: Any, place: Place, at: str = "", chain: Place = ()) -> Any:
        """Return `value`, found at `place`, with every reference replaced; `at` names it in errors."""
        if isinstance(value, Mapping):
            return {key: self(item, (*place, key), at, chain) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self(item, place, at, chain) for item in value]
        if not isinstance(value, str):
            return value
        return self._replace(value, place, at or ".".join(place), chain) if "${" in value else self.read(value)

    def _replace(self, given: str, place: Place, at: str, chain: Place) -> Any:
        """Replace the references of one text, innermost first."""
        text = str(given)
        while match := INNERMOST.search(text):
            value = self._look_up(match[1].strip(), place, at, chain)
            if match.span() == (0, len(text)):
                return value
            if isinstance(value, (list, Mapping)):
                raise ConfigError(
                    f"{at}: ${{{match[1]}}} is a list or a section and cannot be part of a string",
                    fix="use the reference alone, or refer to a single value",
                )
            # Paste the value and search again: references may be nested, `${globals.${globals.NAME}}`.
            text = text[: match.start()] + ("null" if value is None else str(value)) + text[match.end() :]
        if "${" in text:
            raise ConfigError(f"{at}: {text[:60]!r} has a ${{ without }}", fix="close it with }")
        return self.read(Plain(text) if isinstance(given, Plain) else text)

    def _look_up(self, reference: str, place: Place, at: str, chain: Place) -> Any:
        """Return the value that a reference names, with the references in it replaced."""
        self._num_looked_up += 1
        if self._num_looked_up > MOST_LOOKUPS:
            here = f"{at}: ${{{reference}}} is one of more than {MOST_LOOKUPS:,} references"
            raise ConfigError(here, fix="use fewer references")
        name, is_function, arguments = reference.partition(":")
        if is_function:
            if name.strip() != "mul":
                raise ConfigError(
                    f"{at}: ${{{reference}}} is an unknown function", fix="write its value; only ${mul: a, b} is known"
                )
            return multiply(arguments, f"{at}: ${{{reference}}}")
        found, there = self.find(name, place, at)
        named = ".".join(there)
        # `chain` holds the references that led here: meeting one of them again is a cycle.
        if named in chain or len(chain) >= MOST_IN_A_ROW:
            what = "refers to itself" if named in chain else f"is one of more than {MOST_IN_A_ROW} references in a row"
            why = " -> ".join((*chain, named))
            raise ConfigError(f"{at}: ${{{reference}}} {what}", why=why, fix="give one of them a plain value")
        return self(found, there, at, (*chain, named))


LARGEST = 1e15


def multiply(arguments: str, at: str) -> int | float:
    """Compute `${mul: a, b}`, the one function in public configs; the size of the result is bounded."""
    factors = [parse_scalar(part.strip()) for part in arguments.split(",")]
    for factor in factors:
        if isinstance(factor, bool) or not isinstance(factor, int | float):
            raise ConfigError(f"{at} multiplies {factor!r}, which is not a number", fix="write the value itself")
    product: int | float = math.prod(factors)  # type: ignore[arg-type]
    if not abs(product) <= LARGEST:  # NaN fails the comparison
        raise ConfigError(f"{at} is larger than {LARGEST:g}", fix="write the value itself")
    return product
