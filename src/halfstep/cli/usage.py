"""How words become a command's arguments, and how a mistake in them becomes one of our errors.

Commands on a run's folder take the options of that run's workload besides their own. The parser knows only what every
workload shares, so a family's options (`PredictCommand.options`) are taken out of the words before it sees them, and
stand below its help. No torch: a run's config file names the workload.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperCommand

from halfstep.errors import ConfigError

if TYPE_CHECKING:
    from halfstep.workloads.base.kind import Kind, Option

USAGE_ERROR: type[Exception] = typer.BadParameter.__bases__[0]
"""The base of all of the parser's own errors; typer has no public name for it."""

EXPECTED = {"valid integer": "a whole number", "valid number": "a number"}
"""Our words for what typer says of a value."""

OF_OTHERS = {
    "-v": "leave it out: all is shown, and --quiet shows less",
    "--verbose": "leave it out: all is shown, and --quiet shows less",
    "--no-interactive": "leave it out: nothing asks questions",
    "--no-tensorboard": "leave it out: --tensorboard writes events",
    "--no-sub-logdirs": "--out DIR is the run's folder itself",
    "--run-eval-after-training": "halfstep evaluate RUN, after the run",
}
"""Flags of SlotContrast's own command that have no part in this one, and what to do instead."""


def refused(error: Any, words: Sequence[str] = (), context: Any = None) -> ConfigError:
    """The parser's error in our words; `words` are those it was given, `context` the command they were for."""
    context = error.ctx or context
    called = context.command_path if context else "halfstep"
    help_text = f"{called} --help explains every argument" if " " in called else f"{called} --help lists all commands"
    said = list(given(words, error.param)) if getattr(error, "param", None) is not None else []
    if said:
        return ConfigError(f"{said[-1]}: {_expectation(error.message)}", fix=help_text)
    what = getattr(error, "message", "") or error.format_message()
    is_unknown = hasattr(error, "possibilities")
    names = {one.name for one in context.command.params} if context is not None else set()
    if is_unknown and "quiet" in names and (instead := OF_OTHERS.get(error.option_name)):
        return ConfigError(what.rstrip("."), fix=instead)
    if is_unknown and "precision" in names and _is_precision(precision := error.option_name.lstrip("-")):
        return ConfigError(what.rstrip("."), fix=f"--precision {precision}")
    has_settings = "words" in names
    if is_unknown and has_settings and (setting := _setting(error.option_name)):
        same = _same_option(setting, context.command.params)
        fix = f"did you mean {same}?" if same else f"settings are words: {setting}=VALUE."
        return ConfigError(what.rstrip("."), fix=f"{fix} {help_text}")
    near = [name for name in getattr(error, "possibilities", None) or () if name != "--help"]
    nearest = f"did you mean {' or '.join(near)}? " if near else ""
    if is_unknown and has_settings and not near:
        nearest = _near_setting(error.option_name)
    return ConfigError(what.rstrip("."), fix=nearest + help_text)


def _is_precision(word: str) -> bool:
    from halfstep.config.precision_names import PRECISIONS

    return word in PRECISIONS


def _setting(option: str) -> str:
    """The setting that an option which is none would be: `--learning_rate`, `--optimizer.lr`."""
    from halfstep.config.aliases import KEY_ALIASES, PRECISION_KEYS

    name = option.lstrip("-").replace("-", "_")
    return name if name in KEY_ALIASES or name in PRECISION_KEYS or "." in name else ""


def _same_option(setting: str, options: Sequence[Any]) -> str:
    """The option of the same setting: `--lr` for `learning_rate`; empty where there is none."""
    from halfstep.config.aliases import KEY_ALIASES

    paths = {key: alias.path for key, alias in KEY_ALIASES.items()}
    path = paths.get(setting, setting)
    return next((option.opts[0] for option in options if paths.get(option.name) == path), "")


def _near_setting(option: str) -> str:
    """`did you mean optimizer.weight_decay=VALUE? ` for an option that looks like a setting; else empty."""
    from halfstep.config.keys import suggestion
    from halfstep.config.schema import RunConfig

    found = suggestion(option.lstrip("-").replace("-", "_"), RunConfig)
    return f"{found.removesuffix('?')}, as KEY=VALUE? " if found.startswith("did you mean") else ""


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
    """One flag that was given two values."""
    different = list(dict.fromkeys(text.replace("=", " ", 1) for text in said))
    if len(different) > 1:
        raise ConfigError(" and ".join(f"`{text}`" for text in different) + " disagree", fix="keep one of them")


class RunCommand(OnceCommand):
    """Leaves what was given of the workload's options in the context's `obj`, by name."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        from halfstep.workloads import KINDS

        command = str(self.name)  # evaluate or predict
        workload = workload_of(args, trust="--trust" in args)
        own = options_of(KINDS.of(workload), command) if workload else ()
        families = list(KINDS.translators())
        # Those of other families are taken as well: they are refused by name, with what this workload takes.
        known = {option.flag: option for kind in families for option in options_of(kind, command)}
        known |= {option.flag: option for option in own}
        if workload or not {"-h", "--help"} & set(args):
            self.help = f"{self.help}\n\n{text_of(own, f'Options of {workload}')}" if own else self.help
        else:
            texts = [text_of(options_of(kind, command), f"Options of {kind.task}") for kind in families]
            self.help = "\n\n".join(filter(None, [self.help, *texts]))
        rest, given = taken(args, known)
        ctx.obj = given
        try:
            return super().parse_args(ctx, rest)
        except ConfigError as error:
            if own and "no such option" in error.what.lower():
                error.fix = f"{workload} takes {', '.join(option.flag for option in own)}; {error.fix}"
            raise


def workload_of(args: Sequence[str], *, trust: bool) -> str:
    """The workload of the run among the words; empty where there is none, which the command itself will refuse."""
    from halfstep.config.yaml_source import read_yaml
    from halfstep.workloads import KINDS

    for word in args:
        config = Path(word) / "config.yaml"
        if not word.startswith("-") and config.is_file():
            workload = str(read_yaml(config).values.get("workload") or "")
            if workload not in ("", *KINDS) and not trust:
                from halfstep.run.folder import RunFolder
                from halfstep.workloads.base.import_path import refuse_unknown_code

                refuse_unknown_code([workload], RunFolder(Path(word)).settled().code, config)
            return workload
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


def options_of(kind: Kind, command: str) -> tuple[Option, ...]:
    declared = kind.evaluate if command == "evaluate" else kind.predict
    return declared.options if declared else ()


def text_of(options: Sequence[Option], title: str) -> str:
    """A paragraph each: the help text's own form."""
    return "\n\n".join([f"{title}:", *(line_of(option) for option in options)]) if options else ""


def line_of(option: Option) -> str:
    value = "" if option.type is bool else f" {option.type.__name__.upper()}"
    default = "" if option.default in (None, False, "") else f" (default {option.default})"
    return f"    {option.flag}{value}  {option.help}{default}"
