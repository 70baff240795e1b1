"""The `halfstep` command: collects the commands, normalises flags, turns our errors into messages and exit codes.

A reader may leave (`halfstep check x.py | head -1`): neither what a command does nor its exit code depends on that.
"""

from __future__ import annotations

import errno
import importlib
import inspect
import io
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperCommand

from halfstep.disk import GONE, normalise_path, redirect_to_null
from halfstep.errors import ConfigError, HalfstepError, Interrupted, MemoryLimitError

if TYPE_CHECKING:
    from typing import TextIO

    from _typeshed import ReadableBuffer

    from halfstep.workloads.base.kind import Kind, Option


class PatientFile(io.FileIO):
    """Writes until nobody reads any more, then to nowhere."""

    def write(self, data: ReadableBuffer, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in GONE:
                raise
            redirect_to_null(self.fileno())
            return len(memoryview(data))


def wrap_standard_streams() -> None:
    """Both standard streams of a real process; those that somebody put in their place are left alone."""
    if sys.stdout is sys.__stdout__ and sys.stdout is not None:
        sys.stdout = _wrap_stream(sys.stdout)
    if sys.stderr is sys.__stderr__ and sys.stderr is not None:
        sys.stderr = _wrap_stream(sys.stderr)


def flush_or_drop() -> None:
    """What a full disk refused must not come up again when Python ends: that would change the exit code to 120."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            redirect_to_null(stream.fileno())


def _wrap_stream(stream: TextIO) -> TextIO:
    buffer = io.BufferedWriter(PatientFile(stream.fileno(), "w", closefd=False))
    # A terminal that lacks a character gets its number: output never ends a run.
    return io.TextIOWrapper(buffer, stream.encoding, "backslashreplace", line_buffering=bool(stream.line_buffering))


COMMANDS = (
    *("bench", "check", "compare", "detect", "dry-run", "evaluate", "exercise", "formats", "guide", "ledger"),
    *("pack", "plan", "predict", "replay", "report", "top", "train", "verify"),
)
"""Each is the function `command` of the module of its name, parsed with the settings in the module's `CONTEXT`."""

COMMANDS_ON_RUNS = ("evaluate", "predict")
"""Commands whose options depend on the workload of the run they are given."""


def build_app(names: Iterable[str] = COMMANDS) -> typer.Typer:
    """The command line with these commands; a module is imported only when its command is there."""
    app = typer.Typer(
        name="halfstep",
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(root)
    for name in names:
        module = importlib.import_module(f"halfstep.cli.{name.replace('-', '_')}")
        text = unwrap_paragraphs(module.command.__doc__)
        kind = RunCommand if name in COMMANDS_ON_RUNS else OnceCommand
        app.command(name, help=text, cls=kind, context_settings=getattr(module, "CONTEXT", None))(module.command)
    return app


def unwrap_paragraphs(docstring: str) -> str:
    """Each paragraph as one line: typer keeps a docstring's own line breaks, whatever the terminal's width."""
    paragraphs = inspect.cleandoc(docstring).split("\n\n")
    return "\n\n".join(re.sub(r"\n\s*", " ", paragraph) for paragraph in paragraphs)


def choose_commands(argv: Sequence[str]) -> Sequence[str]:
    """The command asked for alone: building the others takes longer than comparing two configs."""
    return argv[:1] if argv and argv[0] in COMMANDS else COMMANDS


def show_version(asked: bool) -> None:
    if asked:
        from halfstep import __version__

        typer.echo(f"halfstep {__version__}")
        raise typer.Exit


def root(
    version: bool = typer.Option(False, "--version", callback=show_version, is_eager=True, help="Show the version."),
) -> None:
    """Mixed-precision training for PyTorch: fast, safe and provable."""


def normalise_dashes(argv: Sequence[str]) -> list[str]:
    """`--data_dir X` and `--data-dir X` are the same flag; values and `key=value` overrides stay as they are."""
    stop = list(argv).index("--") if "--" in argv else len(argv)
    dashed = [re.sub(r"^--[^=]+", lambda flag: flag.group().replace("_", "-"), word) for word in argv[:stop]]
    return dashed + list(argv[stop:])


def shorten_paths(argv: Sequence[str]) -> list[str]:
    """`data/../d` is `d`, as an argument or after `--flag=`; a run makes the paths of its settings absolute itself."""

    def shorten(word: str) -> str:
        flag, equals, value = word.partition("=") if word.startswith("--") else ("", "", word)
        # Other texts may hold `..` as well: a path goes up from a folder that is there.
        is_path = ".." in value.split(os.sep) and "=" not in value and os.path.isdir(value[: value.rindex("..") + 2])
        return f"{flag}{equals}{normalise_path(value)}" if is_path else word

    return [shorten(word) for word in argv]


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line; exit 0 only when what it says holds, 1 for findings, 2 for the user's own mistake."""
    words = shorten_paths(normalise_dashes(sys.argv[1:] if argv is None else argv)) or ["--help"]
    wrap_standard_streams()
    try:
        # Not standalone: typer would draw its own errors, in another form than ours.
        sys.exit(build_app(choose_commands(words))(words, prog_name="halfstep", standalone_mode=False) or 0)
    except USAGE_ERROR as error:
        show_once(explain_usage_error(error))
        sys.exit(2)
    except HalfstepError as error:
        show_once(error)
        sys.exit(error.exit_code)
    except OSError as error:
        show_error(explain_os_error(error))
        sys.exit(2)
    except (MemoryError, RuntimeError) as error:
        show_once(explain_memory_error(error))
        sys.exit(2)
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(130)
    finally:
        flush_or_drop()


UNUSABLE = {getattr(errno, name) for name in ("EACCES", "EPERM", "EROFS", "EEXIST", "ENOTDIR", "EISDIR", "ENOSPC")}


def explain_os_error(error: OSError) -> HalfstepError:
    """A file or folder that the user named and that cannot be written or read; anything else is our mistake."""
    if error.errno == errno.ENOSPC and error.filename is None:
        from halfstep.report.run_report import explain_unwritable_output

        return explain_unwritable_output(error)
    if error.errno not in UNUSABLE or error.filename is None:
        raise error
    if error.errno in (errno.EEXIST, errno.ENOTDIR):
        return ConfigError(f"{error.filename} is in the way", why="it is a file, or inside one", fix="name a folder")
    return ConfigError(
        f"cannot use {error.filename}: {error.strerror}", fix="look at its permissions, or choose another place"
    )


def explain_memory_error(error: MemoryError | RuntimeError) -> HalfstepError:
    """Sizes that no memory holds, such as a number with a digit too many; torch says so by a RuntimeError."""
    asked = re.search(r"DefaultCPUAllocator: .*?(tried to allocate \d+ bytes)", str(error))
    if asked is None and not isinstance(error, MemoryError):
        raise error
    return MemoryLimitError(
        "out of memory: this machine has too little for these sizes",
        why=asked[1] if asked else str(error).strip().split("\n")[-1],
        fix="a smaller train.batch_size, data.image_size or model, or fewer data.num_workers",
    )


def show_once(error: HalfstepError) -> None:
    """Of several processes that met the same error, one shows it."""
    if error.is_told is None and "RANK" in os.environ:
        from halfstep.distributed.launch import choose_speaker

        choose_speaker(error, os.environ)
    if not error.is_told:
        show_error(error)


def show_error(error: HalfstepError) -> None:
    from rich.console import Console
    from rich.text import Text

    from halfstep.report.tables import print_text

    console = Console(stderr=True)
    if isinstance(error, Interrupted):  # no mistake, and nothing to fix: it says itself who stopped it
        print_text(console, Text(error.what, style="yellow"))
        for text in filter(None, (error.why, error.fix)):
            print_text(console, Text(f"  {text}"))
        return
    print_text(console, Text.assemble(("error: ", "bold red"), error.what))
    for label, text in (("why", error.why), ("fix", error.fix)):
        if text:
            print_text(console, Text(f"  {label}: ", style="bold") + Text(text))


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


def explain_usage_error(error: Any, words: Sequence[str] = (), context: Any = None) -> ConfigError:
    """The parser's error in our words; `words` are those it was given, `context` the command they were for."""
    context = error.ctx or context
    called = context.command_path if context else "halfstep"
    help_text = f"{called} --help explains every argument" if " " in called else f"{called} --help lists all commands"
    said = list(find_occurrences(words, error.param)) if getattr(error, "param", None) is not None else []
    if said:
        return ConfigError(f"{said[-1]}: {_format_expectation(error.message)}", fix=help_text)
    what = getattr(error, "message", "") or error.format_message()
    is_unknown = hasattr(error, "possibilities")
    names = {one.name for one in context.command.params} if context is not None else set()
    if is_unknown and "quiet" in names and (instead := OF_OTHERS.get(error.option_name)):
        return ConfigError(what.rstrip("."), fix=instead)
    if is_unknown and "precision" in names and _is_precision(precision := error.option_name.lstrip("-")):
        return ConfigError(what.rstrip("."), fix=f"--precision {precision}")
    has_settings = "words" in names
    if is_unknown and has_settings and (setting := _find_setting(error.option_name)):
        same = _find_same_option(setting, context.command.params)
        fix = f"did you mean {same}?" if same else f"settings are words: {setting}=VALUE."
        return ConfigError(what.rstrip("."), fix=f"{fix} {help_text}")
    near = [name for name in getattr(error, "possibilities", None) or () if name != "--help"]
    nearest = f"did you mean {' or '.join(near)}? " if near else ""
    if is_unknown and has_settings and not near:
        nearest = _suggest_setting(error.option_name)
    return ConfigError(what.rstrip("."), fix=nearest + help_text)


def _is_precision(word: str) -> bool:
    from halfstep.config.precision_names import PRECISIONS

    return word in PRECISIONS


def _find_setting(option: str) -> str:
    """The setting that an option which is none would be: `--learning_rate`, `--optimizer.lr`."""
    from halfstep.config.aliases import KEY_ALIASES, PRECISION_KEYS

    name = option.lstrip("-").replace("-", "_")
    return name if name in KEY_ALIASES or name in PRECISION_KEYS or "." in name else ""


def _find_same_option(setting: str, options: Sequence[Any]) -> str:
    """The option of the same setting: `--lr` for `learning_rate`; empty where there is none."""
    from halfstep.config.aliases import KEY_ALIASES

    paths = {key: alias.path for key, alias in KEY_ALIASES.items()}
    path = paths.get(setting, setting)
    return next((option.opts[0] for option in options if paths.get(option.name) == path), "")


def _suggest_setting(option: str) -> str:
    """`did you mean optimizer.weight_decay=VALUE? ` for an option that looks like a setting; else empty."""
    from halfstep.config.keys import suggest_key
    from halfstep.config.schema import RunConfig

    found = suggest_key(option.lstrip("-").replace("-", "_"), RunConfig)
    return f"{found.removesuffix('?')}, as KEY=VALUE? " if found.startswith("did you mean") else ""


def _format_expectation(message: str) -> str:
    expected = next((ours for theirs, ours in EXPECTED.items() if theirs in message), "")
    return f"expected {expected}" if expected else message.replace("Input should be", "it must be")


def find_occurrences(words: Sequence[str], parameter: Any) -> Iterator[str]:
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
                refuse_conflict(list(find_occurrences(args, parameter)))
        words = list(args)  # parsing takes its words from the list
        try:
            return super().parse_args(ctx, args)
        except USAGE_ERROR as error:
            raise explain_usage_error(error, words, ctx) from None


def refuse_conflict(said: Sequence[str]) -> None:
    """One flag that was given two values."""
    different = list(dict.fromkeys(text.replace("=", " ", 1) for text in said))
    if len(different) > 1:
        raise ConfigError(" and ".join(f"`{text}`" for text in different) + " disagree", fix="keep one of them")


class RunCommand(OnceCommand):
    """Leaves what was given of the workload's options in the context's `obj`, by name."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        from halfstep.workloads import KINDS

        command = str(self.name)  # evaluate or predict
        workload = find_workload(args, trust="--trust" in args)
        own = find_options(KINDS.of(workload), command) if workload else ()
        families = list(KINDS.translators())
        # Those of other families are taken as well: they are refused by name, with what this workload takes.
        known = {option.flag: option for kind in families for option in find_options(kind, command)}
        known |= {option.flag: option for option in own}
        if workload or not {"-h", "--help"} & set(args):
            self.help = f"{self.help}\n\n{format_options(own, f'Options of {workload}')}" if own else self.help
        else:
            texts = [format_options(find_options(kind, command), f"Options of {kind.task}") for kind in families]
            self.help = "\n\n".join(filter(None, [self.help, *texts]))
        rest, given = extract_options(args, known)
        ctx.obj = given
        try:
            return super().parse_args(ctx, rest)
        except ConfigError as error:
            if own and "no such option" in error.what.lower():
                error.fix = f"{workload} takes {', '.join(option.flag for option in own)}; {error.fix}"
            raise


def find_workload(args: Sequence[str], *, trust: bool) -> str:
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


def extract_options(args: Sequence[str], known: dict[str, Option]) -> tuple[list[str], dict[str, Any]]:
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
            refuse_conflict(said[flag])
    return rest, given


def find_options(kind: Kind, command: str) -> tuple[Option, ...]:
    declared = kind.evaluate if command == "evaluate" else kind.predict
    return declared.options if declared else ()


def format_options(options: Sequence[Option], title: str) -> str:
    """A paragraph each: the help text's own form."""
    return "\n\n".join([f"{title}:", *(format_option(option) for option in options)]) if options else ""


def format_option(option: Option) -> str:
    value = "" if option.type is bool else f" {option.type.__name__.upper()}"
    default = "" if option.default in (None, False, "") else f" (default {option.default})"
    return f"    {option.flag}{value}  {option.help}{default}"
