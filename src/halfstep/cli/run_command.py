"""Commands on a run's folder take the options of that run's workload besides their own.

The parser knows only what every workload shares, so a family's options (`Kind.predict_options`) are taken out of the
words before it sees them, and stand below its help. No torch: a run's config file names the workload.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halfstep.cli.once import OnceCommand, refuse_two
from halfstep.errors import ConfigError

if TYPE_CHECKING:
    from halfstep.workloads.kind import Kind
    from halfstep.workloads.options import Option


class RunCommand(OnceCommand):
    """Leaves what was given of the workload's options in the context's `obj`, by name."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        from halfstep.workloads import KINDS

        field = f"{self.name}_options"
        workload = workload_of(args)
        own: tuple[Option, ...] = getattr(KINDS.of(workload), field) if workload else ()
        families = list(KINDS.translators())
        # Those of other families are taken as well: they are refused by name, with what this workload takes.
        known = {option.flag: option for kind in families for option in getattr(kind, field)}
        known |= {option.flag: option for option in own}
        if workload or not is_help(args):
            self.help = f"{self.help}\n\n{text_of(own, f'Options of {workload}')}" if own else self.help
        else:
            self.help = "\n\n".join([self.help or "", *(of_family(kind, field) for kind in families)])
        rest, given = taken(args, known)
        ctx.obj = given
        try:
            return super().parse_args(ctx, rest)
        except ConfigError as error:
            if own and "no such option" in error.what.lower():
                error.fix = f"{workload} takes {', '.join(option.flag for option in own)}; {error.fix}"
            raise


def is_help(args: Sequence[str]) -> bool:
    return bool({"-h", "--help"} & set(args))


def workload_of(args: Sequence[str]) -> str:
    """The workload of the run among the words; empty where there is none, which the command itself will refuse."""
    from halfstep.config.yaml_source import read_yaml

    for word in args:
        config = Path(word) / "config.yaml"
        if not word.startswith("-") and config.is_file():
            return str(read_yaml(config).values.get("workload") or "")
    return ""


def taken(args: Sequence[str], known: dict[str, Option]) -> tuple[list[str], dict[str, Any]]:
    """The words without a family's options, and these by name."""
    rest: list[str] = []
    given: dict[str, Any] = {}
    said: dict[str, list[str]] = {}
    words: Iterator[str] = iter(args)
    for word in words:
        flag, equals, value = word.partition("=")
        option = known.get(flag)
        if word == "--":
            rest += [word, *words]
        elif option is None:
            rest.append(word)
        else:
            if option.type is bool:
                if equals:
                    raise ConfigError(f"{word}: {flag} takes no value", fix=flag)
                value = "yes"
            elif not equals and (value := next(words, "")) == "":
                raise ConfigError(f"{flag} needs a value", fix=f"{flag} {option.type.__name__.upper()}")
            given[option.name] = True if option.type is bool else value
            said.setdefault(flag, []).append(f"{flag} {value}")
            refuse_two(said[flag])
    return rest, given


def of_family(kind: Kind, field: str) -> str:
    return text_of(getattr(kind, field), f"Options of {kind.task}")


def text_of(options: Sequence[Option], title: str) -> str:
    """A paragraph each: the help text's own form."""
    return "\n\n".join([f"{title}:", *(line_of(option) for option in options)]) if options else ""


def line_of(option: Option) -> str:
    value = "" if option.type is bool else f" {option.type.__name__.upper()}"
    default = "" if option.default in (None, False, "") else f" (default {option.default})"
    return f"    {option.flag}{value}  {option.help}{default}"
