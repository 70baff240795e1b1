"""`halfstep-check`: do my configs agree, and is my training script's AMP code right?

`halfstep check` is the same command with the functions of `Host`, which need halfstep-train.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from halfstep_check.shared.errors import ConfigError, HalfstepError
from halfstep_check.shared.terminal import (
    USAGE_ERROR,
    explain_usage_error,
    flush_or_drop,
    option,
    show_error,
    unwrap_paragraphs,
    wrap_standard_streams,
)

if TYPE_CHECKING:
    from collections.abc import Collection

    from rich.console import Console

    from halfstep_check.check import LoadOwn, Report
    from halfstep_check.declarations import Source
    from halfstep_check.findings import Finding
    from halfstep_check.hardware_gap import Device

MAX_SOURCES = 100
"""Sources shown in the table; a longer one is unreadable and takes seconds to lay out."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line; exit code 0 for aligned input, 1 for findings, 2 for input that cannot be read."""
    words = list(sys.argv[1:] if argv is None else argv)
    wrap_standard_streams()
    app = typer.Typer(
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    command = make_command()
    app.command(help=unwrap_paragraphs(command.__doc__ or ""))(command)
    try:
        # Not standalone: typer would draw its own errors, in another form than ours.
        sys.exit(app(words, prog_name="halfstep-check", standalone_mode=False) or 0)
    except USAGE_ERROR as error:
        show_error(explain_usage_error(error))
        sys.exit(2)
    except HalfstepError as error:
        show_error(error)
        sys.exit(error.exit_code)
    except OSError as error:
        show_error(ConfigError(f"cannot use {error.filename or 'the output'}: {error.strerror}"))
        sys.exit(2)
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(130)
    finally:
        flush_or_drop()


def show_version(asked: bool) -> None:
    if asked:
        from halfstep_check import __version__

        typer.echo(f"halfstep-check {__version__}")
        raise typer.Exit


@dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    """Functions that need halfstep-train: validating its configs and probing this machine's device."""

    load_own: LoadOwn | None = None
    probe: Callable[[], Device] | None = None


def make_command(host: Host = Host()) -> Callable[..., None]:
    """Return the function that typer makes a command of."""

    def command(
        paths: Annotated[
            list[Path] | None, typer.Argument(metavar="FILE...", help="Configs, scripts, or folders of scripts.")
        ] = None,
        env: Annotated[bool, option("Also read this shell's environment variables.", "--env")] = False,
        project: Annotated[Path | None, option("Find configs and scripts here.", metavar="DIR")] = None,
        commands: Annotated[
            list[str] | None, option("A command line that starts training.", "--command", metavar="TEXT")
        ] = None,
        select: Annotated[list[str] | None, option("Apply only these rules: a,b. Repeatable.", metavar="RULE")] = None,
        ignore: Annotated[list[str] | None, option("Leave these rules out: a,b. Repeatable.", metavar="RULE")] = None,
        gpu: Annotated[str, option("Report what this GPU cannot do: v100, 4090.", metavar="NAME")] = "",
        # Not annotated as the others: an annotation is evaluated where `host` is unknown.
        hardware: bool = typer.Option(
            False, "--hardware", help="Report what this machine cannot do.", hidden=host.probe is None
        ),
        fix: Annotated[bool, option("Print the aligned files as a patch.", "--fix")] = False,
        write: Annotated[bool, option("Apply the patch to the files named, with backups.", "--write")] = False,
        as_json: Annotated[bool, option("Print JSON.", "--json")] = False,
        as_sarif: Annotated[bool, option("Print SARIF, for annotations in CI.", "--sarif")] = False,
        explain: Annotated[str, option("Explain a rule; `all` lists them.", metavar="RULE")] = "",
        version: Annotated[
            bool, typer.Option("--version", callback=show_version, is_eager=True, help="Show the version.")
        ] = False,
    ) -> None:
        """Do these configs agree, and is this training script's AMP code right?

        Reads configs of halfstep, Lightning, Accelerate, DeepSpeed, HF Trainer, torchtitan and Composer, and lints
        PyTorch scripts. Nothing is run. Exit code 0: aligned. 1: findings. 2: input that cannot be read.

        Example:

            halfstep-check configs/train.yaml accelerate.yaml --env

            halfstep-check train.py src/

            halfstep-check --explain clip-before-unscale
        """
        if explain:
            return print_rules(explain)
        named = paths or []
        if not named and project is None and not env and not commands:
            raise ConfigError("nothing to check", fix="give files, or use --project DIR, --env or --command TEXT")
        if as_json and as_sarif:
            raise ConfigError("--json and --sarif are two formats for one output", fix="give one of them")
        if fix and not write and (as_json or as_sarif):
            raise ConfigError("--fix prints a patch, not JSON or SARIF", fix="leave out --fix, or --json and --sarif")
        device, rules = select_device(gpu, hardware, host), select_rules(select or (), ignore or ())
        run = partial(run_check, named, project, commands or (), device, host.load_own, rules, env=env)
        report = run()
        refuse_nothing_read(named, report)
        if write:
            show_written(report, named)
            report = run()
        if fix and not write:
            print_patch(report)
        elif as_json or as_sarif:
            print_machine_readable(report, as_sarif)
        else:
            print_report(report, len(rules))
        raise typer.Exit(report.exit_code)

    return command


def select_rules(select: Sequence[str], ignore: Sequence[str]) -> Collection[str]:
    """Return the names of the rules asked for; a list may be written with commas."""
    from halfstep_check.rules import RULES, get_rule

    def names(said: Sequence[str]) -> set[str]:
        return {get_rule(name.strip()).name for text in said for name in text.split(",") if name.strip()}

    left = (names(select) or set(RULES)) - names(ignore)
    if not left:
        raise ConfigError("no rule is left to apply", why="--ignore names every rule that --select names",
                          fix="leave one of them out")  # fmt: skip
    return left


def run_check(
    named: list[Path],
    project: Path | None,
    commands: Sequence[str],
    device: Device | None,
    load_own: LoadOwn | None,
    rules: Collection[str],
    *,
    env: bool,
) -> Report:
    from halfstep_check.check import check

    variables = dict(os.environ) if env else None
    return check(
        named, project=project, variables=variables, commands=commands, device=device, load_own=load_own, rules=rules
    )


def refuse_nothing_read(named: list[Path], report: Report) -> None:
    """Refuse to report "nothing wrong" if no file was read."""
    if named and not (report.sources or report.num_scripts or report.silent or report.unreadable):
        raise ConfigError(
            f"nothing to check in {', '.join(map(str, named))}",
            why="a folder is searched for Python files; it contains none",
            fix=f"configs of a project are found with --project {named[0]}",
        )


def select_device(gpu: str, here: bool, host: Host) -> Device | None:
    if not gpu and not here:
        return None
    if gpu and here:
        raise ConfigError(f"--gpu {gpu} and --hardware both name a device", fix="give one of them")
    if gpu:
        from halfstep_check.hardware_gap import Device
        from halfstep_check.shared.gpus import look_up_gpu

        known = look_up_gpu(gpu)
        return Device(name=f"{known.vendor} {known.name}", has=known.has)
    if host.probe is None:
        raise ConfigError(
            "--hardware needs halfstep-train",
            why="halfstep-check alone has no torch, which is needed to probe this machine's device",
            fix="in a clone of halfstep, pip install -c constraints.txt -e packages/halfstep -e packages/halfstep-train"
            " and run halfstep check --hardware; or name the device: --gpu NAME",
        )
    return host.probe()


def print_rules(name: str) -> None:
    from rich.console import Console

    from halfstep_check.rules import RULES, get_rule
    from halfstep_check.view import make_rule_view, make_rules_table

    if name == "all":
        Console().print(make_rules_table(RULES.values()))
        return
    Console().print(make_rule_view(get_rule(name)))


def print_sources(console: Console, sources: Sequence[Source]) -> None:
    """Print how each source was read, and what the sources state for each topic."""
    from rich.console import NewLine
    from rich.text import Text

    from halfstep_check.declarations import SHOWN_TOPICS
    from halfstep_check.view import make_says_table

    for source in sources[:MAX_SOURCES]:
        origin = f", named by {source.named_by}" if source.named_by else ""
        console.print(Text.assemble((source.name, "bold"), f": {source.dialect}{origin}"), overflow="fold")
    if len(sources) > MAX_SOURCES:
        console.print(Text(f"… and {len(sources) - MAX_SOURCES} more, checked but not shown; --json lists them"))
    said = [
        (topic, s.value, s.spelled, str(s.place))
        for topic in SHOWN_TOPICS
        for source in sources[:MAX_SOURCES]
        for s in source.declarations
        if s.topic == topic
    ]
    console.print(NewLine(), make_says_table(said), NewLine()) if said else console.print()


MAX_SKIPPED = 10


def print_report(report: Report, num_rules: int) -> None:
    """Print the findings first, so that users with many files need not scroll past the tables."""
    from rich.console import Console, NewLine

    from halfstep_check.rules import RULES
    from halfstep_check.view import format_summary, make_finding_view, make_runs_table

    console = Console()
    for finding in report.findings:
        console.print(make_finding_view(finding), soft_wrap=False)
    print_unreadable(report)
    if report.findings and report.sources:
        console.print()
    if report.sources:
        print_sources(console, report.sources)
    if report.sources and report.effective:
        console.print(make_runs_table(report.effective), NewLine())
    for name in report.silent:
        console.print(f"{name}: states no precision that halfstep-check recognises", style="dim", highlight=False)
    for name in report.unvalidated:
        text = f"{name}: read without halfstep's schema; with halfstep-train installed, halfstep check validates it"
        console.print(text, style="dim", highlight=False)
    for text in report.skipped[:MAX_SKIPPED]:
        console.print(f"not read: {text}", style="yellow", highlight=False)
    if len(report.skipped) > MAX_SKIPPED:
        console.print(f"not read: {len(report.skipped) - MAX_SKIPPED} more files; --json lists them", style="yellow")
    counts = {"num_scripts": report.num_scripts, "num_sources": len(report.sources), "num_ignored": report.num_ignored}
    if not report.unreadable or report.findings:
        by = f", {num_rules} of {len(RULES)} rules" if num_rules < len(RULES) else ""
        console.print(format_summary(report.findings, **counts, by=by))


def print_unreadable(report: Report) -> None:
    for error in report.unreadable:
        typer.secho(f"error: {error}", err=True, fg="red")


def print_patch(report: Report) -> None:
    from halfstep_check.files import read_text
    from halfstep_check.fix import collect_changes, make_patches

    found = collect_changes(report.findings)
    typer.echo(make_patches(found.edits, {path: read_text(Path(path)) for path in found.edits}), nl=False)
    print_unreadable(report)
    if not found.edits:
        typer.secho("nothing here can be fixed by an edit", err=True)
    print_left(found.left)


def show_written(report: Report, named: list[Path]) -> None:
    from halfstep_check.fix import BACKUP_SUFFIX, collect_changes, write

    found = collect_changes(report.findings, {str(path) for path in named})
    for name in write(found.edits):
        typer.secho(f"wrote {name}; the old file is {name}{BACKUP_SUFFIX}", err=True)
    print_left(found.left)


MAX_LEFT = 20


def print_left(left: list[tuple[Finding, str]]) -> None:
    """Print the findings that were not fixed, with the reason."""
    for finding, reason in left[:MAX_LEFT]:
        typer.secho(f"not applied: {finding.place} [{finding.rule}]: {reason}", err=True)
    if len(left) > MAX_LEFT:
        typer.secho(f"not applied: {len(left) - MAX_LEFT} more", err=True)


def print_machine_readable(report: Report, as_sarif: bool) -> None:
    import json

    from halfstep_check import __version__
    from halfstep_check.export import export_json, export_sarif

    content = export_sarif(report.findings, __version__) if as_sarif else export_json(report)
    typer.echo(json.dumps(content, indent=2, ensure_ascii=False))
    print_unreadable(report)
