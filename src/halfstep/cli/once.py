"""A flag given twice with two values is a mistake: taking the last one would train something nobody asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from typer.core import TyperCommand

from halfstep.cli.usage import USAGE_ERROR, given, refused
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
        except USAGE_ERROR as error:
            raise refused(error, words, ctx) from None


def refuse_two(said: Sequence[str]) -> None:
    different = list(dict.fromkeys(text.replace("=", " ", 1) for text in said))
    if len(different) > 1:
        raise ConfigError(" and ".join(f"`{text}`" for text in different) + " disagree", fix="keep one of them")
