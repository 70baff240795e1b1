"""A flag given twice with two values is a mistake: taking the last one would train something nobody asked for.

A value that cannot be is shown as it was given.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import typer
from typer.core import TyperCommand

from halfstep.errors import ConfigError


class OnceCommand(TyperCommand):
    """A command whose flags say one thing each, but for those that are made to be repeated."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        for parameter in self.params:
            if parameter.param_type_name == "option" and not parameter.multiple:
                refuse_two(list(given(args, parameter)))
        words = list(args)  # parsing takes its words from the list
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            if said := list(given(words, error.param)) if error.param is not None else []:
                error.message += f" (given: {said[-1]})"
            raise


def given(words: Sequence[str], parameter: Any) -> Iterator[str]:
    """Every place where the option is given, as it is written."""
    stop = list(words).index("--") if "--" in words else len(words)
    names = {*parameter.opts, *parameter.secondary_opts}
    for place, word in enumerate(words[:stop]):
        name, equals, _ = word.partition("=")
        if name in names:
            has_value = not parameter.is_flag and not equals and place + 1 < stop
            yield f"{word} {words[place + 1]}" if has_value else word


def refuse_two(said: Sequence[str]) -> None:
    different = list(dict.fromkeys(text.replace("=", " ", 1) for text in said))
    if len(different) > 1:
        raise ConfigError(" and ".join(f"`{text}`" for text in different) + " disagree", fix="keep one of them")
