"""A call that the parser refuses, as one of our errors: what was given, what was expected, where to look."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import typer

from halfstep.errors import ConfigError

USAGE_ERROR: type[Exception] = typer.BadParameter.__bases__[0]
"""The base of all of the parser's own errors; typer has no public name for it."""

EXPECTED = {"valid integer": "a whole number", "valid number": "a number"}
"""Our words for what typer says of a value."""


def refused(error: Any, words: Sequence[str] = (), context: Any = None) -> ConfigError:
    """The parser's error in our words; `words` are those it was given, `context` the command they were for."""
    context = error.ctx or context
    called = context.command_path if context else "halfstep"
    help_text = f"{called} --help explains every argument" if " " in called else f"{called} --help lists all commands"
    said = list(given(words, error.param)) if getattr(error, "param", None) is not None else []
    if said:
        return ConfigError(f"{said[-1]}: {_expectation(error.message)}", fix=help_text)
    what = getattr(error, "message", "") or error.format_message()
    near = [name for name in getattr(error, "possibilities", None) or () if name != "--help"]
    nearest = f"did you mean {' or '.join(near)}? " if near else ""
    return ConfigError(what.rstrip("."), fix=nearest + help_text)


def _expectation(message: str) -> str:
    expected = next((ours for theirs, ours in EXPECTED.items() if theirs in message), "")
    return f"expected {expected}" if expected else message.replace("Input should be", "it must be")


def given(words: Sequence[str], parameter: Any) -> Iterator[str]:
    """Every place where the option is given, as it is written."""
    stop = list(words).index("--") if "--" in words else len(words)
    names = {*parameter.opts, *parameter.secondary_opts}
    for place, word in enumerate(words[:stop]):
        name, equals, _ = word.partition("=")
        if name in names:
            has_value = not getattr(parameter, "is_flag", False) and not equals and place + 1 < stop
            yield f"{word} {words[place + 1]}" if has_value else word
