"""Functions that config files of other projects call: `${mul: a, b}`, `${eval: 'a * b + 1', 3, 4}`. Arithmetic only.

`eval` is read as an expression and computed node by node; whatever is not arithmetic is refused, so that a config file
can run nothing. Numbers are bounded, since a power of a power would take all memory there is.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from halfstep.config.section import typed
from halfstep.errors import ConfigError

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
"""Names of the values in an `eval` that names none itself."""
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
"""What `config_prop` looks up: channels and patches of backbones by timm's names, at 224 pixels."""


def counted_by(name: str, arguments: str, at: str) -> Any:
    """The value of `${name: arguments}`; `at` stands in errors."""
    at = f"{at}: ${{{name}:{arguments}}}"
    parts = [part.strip() for part in split_arguments(arguments)]
    try:
        if name == "eval":
            return bounded(computed(unquoted(parts[0]), [typed(part) for part in parts[1:]], at), at)
        if name == "config_prop":
            return PROPERTIES[parts[0]][parts[1]][parts[2]]
        if name not in RESOLVERS:
            known = ", ".join((*RESOLVERS, "eval", "config_prop"))
            raise ConfigError(f"{at} is a function halfstep does not know", fix=f"write its value; known are {known}")
        return bounded(RESOLVERS[name](numbers([typed(part) for part in parts], at)), at)
    except (TypeError, ValueError, ArithmeticError, LookupError) as error:
        raise ConfigError(f"{at} cannot be computed", why=f"{error}", fix="write the value itself") from error


def numbers(values: Sequence[Any], at: str) -> list[Number]:
    if not all(isinstance(value, (int, float)) for value in values):
        raise ConfigError(f"{at} computes with something that is not a number")
    return list(values)


def bounded(value: Any, at: str) -> Number:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= LARGEST:
        raise ConfigError(f"{at} gives {str(value)[:20]}", why=f"settings are numbers up to {LARGEST:g}")
    return value


def split_arguments(text: str) -> list[str]:
    """At commas outside of quotes and brackets."""
    parts, depth, quote = [""], 0, ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        depth += (letter in "([{") - (letter in ")]}") if not quote else 0
        if letter == "," and not quote and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def unquoted(text: str) -> str:
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"" else text


def computed(text: str, values: list[Any], at: str) -> Any:
    """`a * b`, or with names of its own `x, y: x * y`."""
    named, has_names, body = text.removeprefix("lambda ").partition(":")
    names = [name.strip() for name in named.split(",")] if has_names else list(LETTERS[: len(values)])
    known = dict(zip(names, numbers(values, at), strict=True))
    expression = (body if has_names else text).strip()
    if len(expression) > LONGEST:
        raise ConfigError(f"{at} has {len(expression)} characters", why=f"at most {LONGEST} are computed")
    try:
        tree = ast.parse(expression, mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ConfigError(f"{at} is not arithmetic", fix="write the value itself") from None
    return _value(tree.body, known, at)


def _value(node: ast.AST, known: Mapping[str, Number], at: str) -> Number:
    match node:
        case ast.Constant(value=int() | float() as number):
            return bounded(number, at)
        case ast.Name(id=name) if name in known:
            return known[name]
        case ast.UnaryOp(op=op, operand=operand) if type(op) in OPERATIONS:
            return bounded(OPERATIONS[type(op)](_value(operand, known, at)), at)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATIONS:
            one, other = _value(left, known, at), _value(right, known, at)
            if isinstance(op, ast.Pow) and abs(other) > 64:
                raise ConfigError(f"{at}: a power of {other}", why="exponents go up to 64")
            return bounded(OPERATIONS[type(op)](one, other), at)
        case ast.Call(func=ast.Name(id=name), args=given, keywords=[]) if name in FUNCTIONS:
            return bounded(FUNCTIONS[name](*(_value(argument, known, at) for argument in given)), at)
    raise ConfigError(
        f"{at}: {ast.unparse(node)} is not arithmetic",
        why="config files compute numbers with + - * / // % **, min, max, int, round and abs; they run no code",
        fix="write the value itself",
    )
