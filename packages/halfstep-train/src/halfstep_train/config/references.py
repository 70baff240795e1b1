"""Replace `${...}` in config files: alone it keeps the type of the value it names, inside a text it is pasted.

halfstep's files refer to globals only, `${globals.NAME}`. Files of other projects follow OmegaConf:
`${trainer.max_steps}` names any key and `${.NUM_GPUS}` one in the same section. Both may compute: `${mul: a, b}`.

All sizes are bounded. Without bounds a file of one kilobyte could fill the memory: ten keys, each of which names the
previous one ten times, expand to 10^10 values.
"""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from halfstep.errors import ConfigError
from halfstep_train.config.section import Plain, parse_scalar

INNERMOST = re.compile(r"\$\{([^${}]*)\}")
MOST_IN_A_ROW = 20
"""Longest chain of references that lead to one another: a longer one is a mistake, and Python's stack is finite."""
MOST_LOOKUPS = 10_000
MOST_CHARACTERS = 100_000
"""Length of one text; real files need a few hundred."""

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
                    f"{at}: ${{{match[1]}}} is a list or a section and cannot be part of a text",
                    fix="use the reference alone, or name a single value",
                )
            # Paste the value and search again: references may be nested, `${globals.${globals.NAME}}`.
            text = text[: match.start()] + ("null" if value is None else str(value)) + text[match.end() :]
            if len(text) > MOST_CHARACTERS:
                raise ConfigError(f"{at} is longer than {MOST_CHARACTERS:,} characters", fix="shorten it")
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
            return compute_function(name.strip(), arguments, at)
        found, there = self.find(name, place, at)
        named = ".".join(there)
        # `chain` holds the references that led here: meeting one of them again is a cycle.
        if named in chain or len(chain) >= MOST_IN_A_ROW:
            what = "refers to itself" if named in chain else f"is one of more than {MOST_IN_A_ROW} references in a row"
            why = " -> ".join((*chain, named))
            raise ConfigError(f"{at}: ${{{reference}}} {what}", why=why, fix="give one of them a plain value")
        return self(found, there, at, (*chain, named))


# --- functions: `${mul: a, b}`, `${eval: 'a * b + 1', 3, 4}` ---
# `eval` is parsed as an expression and computed node by node. Anything but arithmetic is refused, so that a config file
# cannot run code. Numbers are bounded, because a power of a power would take all memory.

Number = int | float

RESOLVERS: Mapping[str, Callable[[list[Any]], Any]] = {
    "mul": math.prod,
    "add": sum,
    "sum": sum,
    "sub": lambda values: operator.sub(*values),
    "div": lambda values: operator.truediv(*values),
    "min": min,
    "max": max,
}
OPERATIONS: Mapping[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}
FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "int": int, "float": float, "round": round, "abs": abs, "min": min, "max": max,
}  # fmt: skip
LETTERS = "abcdefghijk"
"""Names of the values in an `eval` without parameter names."""
LARGEST = 1e15
LONGEST = 200
"""Characters of an expression."""

_PATCHES = {"vit_small": 384, "vit_base": 768, "vit_large": 1024}
PROPERTIES: Mapping[str, Mapping[str, Mapping[str, int]]] = {
    "VIT_PARAMS": {
        f"{size}_patch{patch}": {"FEAT_DIM": dim, "NUM_PATCHES": patches}
        for size, dim in _PATCHES.items()
        for patch, patches in (("8_224_dino", 784), ("16_224_dino", 196), ("14_dinov2", 256))
    }
}
"""The table of `config_prop`: channels and patches of backbones by timm's names, at 224 pixels."""


def compute_function(name: str, arguments: str, at: str) -> Any:
    """Compute `${name: arguments}`; `at` is used in errors."""
    at = f"{at}: ${{{name}:{arguments}}}"
    parts = [part.strip() for part in split_arguments(arguments)]
    try:
        if name == "eval":
            return check_bounds(evaluate_text(unquote(parts[0]), [parse_scalar(part) for part in parts[1:]], at), at)
        if name == "config_prop":
            # SlotContrast's resolver for backbone sizes; a missing key is reported below.
            return PROPERTIES[parts[0]][parts[1]][parts[2]]
        if name not in RESOLVERS:
            known = ", ".join((*RESOLVERS, "eval", "config_prop"))
            raise ConfigError(f"{at} is an unknown function", fix=f"write its value; known functions: {known}")
        return check_bounds(RESOLVERS[name](check_numbers([parse_scalar(part) for part in parts], at)), at)
    except (TypeError, ValueError, ArithmeticError, LookupError) as error:
        raise ConfigError(f"{at} cannot be computed", why=f"{error}", fix="write the value itself") from error


def check_numbers(values: Sequence[Any], at: str) -> list[Number]:
    if not all(isinstance(value, (int, float)) for value in values):
        wrong = next(value for value in values if not isinstance(value, (int, float)))
        raise ConfigError(f"{at} computes with {wrong!r}, which is not a number", fix="write the value itself")
    return list(values)


def check_bounds(value: Any, at: str) -> Number:
    # bool is an int in Python; NaN fails the comparison.
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= LARGEST:
        raise ConfigError(
            f"{at} gives {str(value)[:20]}",
            why=f"a computed setting must be a number up to {LARGEST:g}",
            fix="write the value itself",
        )
    return value


def split_arguments(text: str) -> list[str]:
    """Split a text at commas outside of quotes and brackets."""
    parts, depth, quote = [""], 0, ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        # Commas inside brackets belong to one argument.
        depth += (letter in "([{") - (letter in ")]}") if not quote else 0
        if letter == "," and not quote and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def unquote(text: str) -> str:
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"" else text


def evaluate_text(text: str, values: list[Any], at: str) -> Any:
    """Evaluate `a * b`, or `x, y: x * y` with parameter names."""
    named, has_names, body = text.removeprefix("lambda ").partition(":")
    # Without parameter names the values are called a, b, c ... in order.
    names = [name.strip() for name in named.split(",")] if has_names else list(LETTERS[: len(values)])
    known = dict(zip(names, check_numbers(values, at), strict=True))
    expression = (body if has_names else text).strip()
    if len(expression) > LONGEST:
        raise ConfigError(
            f"{at} has {len(expression)} characters", why=f"the limit is {LONGEST}", fix="write the value itself"
        )
    try:
        tree = ast.parse(expression, mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ConfigError(f"{at} is not arithmetic", fix="write the value itself") from None
    return _evaluate_node(tree.body, known, at)


def _evaluate_node(node: ast.AST, known: Mapping[str, Number], at: str) -> Number:
    """Evaluate one node of an expression; refuse everything but arithmetic."""
    match node:
        case ast.Constant(value=int() | float() as number):
            return check_bounds(number, at)
        case ast.Name(id=name) if name in known:
            return known[name]
        case ast.UnaryOp(op=op, operand=operand) if type(op) in OPERATIONS:
            return check_bounds(OPERATIONS[type(op)](_evaluate_node(operand, known, at)), at)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATIONS:
            one, other = _evaluate_node(left, known, at), _evaluate_node(right, known, at)
            if isinstance(op, ast.Pow) and abs(other) > 64:
                raise ConfigError(
                    f"{at}: the exponent {other} is too large", why="the limit is 64", fix="use a smaller one"
                )
            return check_bounds(OPERATIONS[type(op)](one, other), at)
        case ast.Call(func=ast.Name(id=name), args=given, keywords=[]) if name in FUNCTIONS:
            return check_bounds(FUNCTIONS[name](*(_evaluate_node(argument, known, at) for argument in given)), at)
    raise ConfigError(
        f"{at}: {ast.unparse(node)} is not arithmetic",
        why="config files compute numbers with + - * / // % **, min, max, int, round and abs; they run no code",
        fix="write the value itself",
    )
