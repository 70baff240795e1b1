"""`halfstep check`: do my configs agree, and is my training script's AMP code right?"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from halfstep.cli.options import Json, option
from halfstep.errors import ConfigError, suggested

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rich.console import Console

    from halfstep.align.check import Report
    from halfstep.align.declarations import Source
    from halfstep.align.findings import Finding
    from halfstep.align.hardware_gap import Device
    from halfstep.report.check_view import FindingLines

MAX_SOURCES = 100
"""A table of more is read by nobody, and takes seconds to lay out."""


def command(
    paths: Annotated[
        list[Path] | None, typer.Argument(metavar="FILE...", help="Configs, scripts, or folders of scripts.")
    ] = None,
    env: Annotated[bool, option("Also read this shell's environment variables.", "--env")] = False,
    project: Annotated[Path | None, option("Find configs and scripts here.", metavar="DIR")] = None,
    commands: Annotated[
        list[str] | None, option("A command line that starts training.", "--command", metavar="TEXT")
    ] = None,
    gpu: Annotated[str, option("Say what this GPU cannot do: v100, 4090.", metavar="NAME")] = "",
    hardware: Annotated[bool, option("Say what this machine cannot do.", "--hardware")] = False,
    fix: Annotated[bool, option("Print the aligned files as a patch.", "--fix")] = False,
    write: Annotated[bool, option("Apply the patch to the files named, with backups.", "--write")] = False,
    as_json: Json = False,
    as_sarif: Annotated[bool, option("Print SARIF, for annotations in CI.", "--sarif")] = False,
    explain: Annotated[str, option("Explain a rule; `all` lists them.", metavar="RULE")] = "",
) -> None:
    """Do these configs agree, and is this training script's AMP code right?

    Reads configs of halfstep, Lightning, Accelerate, DeepSpeed, HF Trainer, torchtitan and Composer, and lints
    PyTorch scripts. Nothing is run. Exit code 0: aligned. 1: findings. 2: input that cannot be read.

    Example:

        halfstep check configs/train.yaml accelerate.yaml --env

        halfstep check train.py src/

        halfstep check --explain clip-before-unscale
    """
    if explain:
        return print_rules(explain)
    named = paths or []
    if not named and project is None and not env and not commands:
        raise ConfigError("nothing to check", fix="name files, or --project DIR, --env, --command TEXT")
    if as_json and as_sarif:
        raise ConfigError("--json and --sarif are two formats for one output", fix="give one of them")
    run = partial(checked, named, project, commands or (), device_asked(gpu, hardware), env=env)
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
        print_report(report)
    raise typer.Exit(report.exit_code)


def checked(
    named: list[Path], project: Path | None, commands: Sequence[str], device: Device | None, *, env: bool
) -> Report:
    from halfstep.align.check import check

    variables = dict(os.environ) if env else None
    return check(
        named, project=project, variables=variables, commands=commands, device=device, progress=count_files(),
        load_own=load_own,
    )  # fmt: skip


def refuse_nothing_read(named: list[Path], report: Report) -> None:
    """ "Nothing wrong" about nothing read would be a green light for nobody's code."""
    if named and not (report.sources or report.num_scripts or report.silent or report.unreadable):
        raise ConfigError(
            f"nothing to check in {', '.join(map(str, named))}",
            why="a folder is searched for Python files; it holds none",
            fix=f"configs of a project are found with: {suggested('check', '--project', named[0])}",
        )


def load_own(path: Path) -> object:
    from halfstep.workloads import load

    return load(str(path))


MIN_COUNTED = 100
"""Fewer files are read before anybody wonders."""


def count_files() -> Callable[[int, int], None]:
    """A line on the terminal that says how far reading a large tree is; nothing where nobody looks."""
    from rich.console import Console

    console = Console(stderr=True)

    def show(done: int, total: int) -> None:
        if console.is_terminal and total >= MIN_COUNTED and (done % 20 == 0 or done == total):
            end = "\r" if done < total else "\r" + " " * 40 + "\r"
            console.file.write(f"read {done:,} of {total:,} files{end}")
            console.file.flush()

    return show


def device_asked(gpu: str, here: bool) -> Device | None:
    if not gpu and not here:
        return None
    from halfstep.align.hardware_gap import Device

    if gpu and here:
        raise ConfigError(f"--gpu {gpu} and --hardware both name a device", fix="give one of them")
    if gpu:
        from halfstep.hardware.gpus import known_gpu

        known = known_gpu(gpu)
        return Device(name=known.name, has=known.has)
    from halfstep.hardware.probe import probe

    found = probe()
    return Device(name=found.name, has=found.has)


def print_rules(name: str) -> None:
    import dataclasses

    from rich.console import Console

    from halfstep.align.rules import RULES, rule_named
    from halfstep.report.check_view import rule_view
    from halfstep.report.tables import rows_table

    if name == "all":
        rows = [(rule.name, rule.severity.value, rule.title) for rule in RULES.values()]
        Console().print(rows_table(("rule", "severity", "what it finds"), rows))
        return
    rule = rule_named(name)
    Console().print(rule_view(**{**dataclasses.asdict(rule), "severity": rule.severity.value}))


def lines_of(finding: Finding) -> FindingLines:
    from halfstep.align.rules import severity_of
    from halfstep.report.check_view import FindingLines

    return FindingLines(
        severity=severity_of(finding).value,
        place=str(finding.place),
        rule=finding.rule,
        message=finding.message,
        fix=finding.fix,
        related=tuple(str(place) for place in finding.related),
        has_edit=bool(finding.edits),
    )


def print_sources(console: Console, sources: Sequence[Source]) -> None:
    """Who was read as what, and what all of them say, topic by topic."""
    from rich.console import NewLine
    from rich.text import Text

    from halfstep.align.declarations import SHOWN_TOPICS
    from halfstep.report.check_view import says_table

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
    console.print(NewLine(), says_table(said), NewLine()) if said else console.print()


def print_report(report: Report) -> None:
    """Findings first: who has many files would otherwise scroll past the tables to what is wrong."""
    from rich.console import Console, NewLine

    from halfstep.report.check_view import print_findings, runs_table, summary

    console = Console()
    lines = [lines_of(finding) for finding in report.findings]
    print_findings(console, lines)
    print_unreadable(report)
    if lines and report.sources:
        console.print()
    if report.sources:
        print_sources(console, report.sources)
    if report.sources and report.effective:
        console.print(runs_table([(e.topic, e.value, e.source, e.reason) for e in report.effective]), NewLine())
    for name in report.silent:
        console.print(f"{name}: says nothing about precision that halfstep knows", style="dim", highlight=False)
    counts = {"num_scripts": report.num_scripts, "num_sources": len(report.sources), "num_ignored": report.num_ignored}
    if not report.unreadable or lines:
        console.print(summary(lines, **counts))


def print_unreadable(report: Report) -> None:
    for error in report.unreadable:
        typer.secho(f"error: {error}", err=True, fg="red")


def print_patch(report: Report) -> None:
    from halfstep.align.files import read_text
    from halfstep.align.fix import changes, patches

    found = changes(report.findings)
    typer.echo(patches(found.edits, {path: read_text(Path(path)) for path in found.edits}), nl=False)
    print_unreadable(report)
    if not found.edits:
        typer.secho("nothing here can be fixed by an edit", err=True)
    print_left(found.left)


def show_written(report: Report, named: list[Path]) -> None:
    from halfstep.align.fix import BACKUP_SUFFIX, changes, write

    found = changes(report.findings, {str(path) for path in named})
    for name in write(found.edits):
        typer.secho(f"wrote {name}; the old file is {name}{BACKUP_SUFFIX}", err=True)
    print_left(found.left)


MAX_LEFT = 20


def print_left(left: list[tuple[Finding, str]]) -> None:
    """Which findings no edit was made for, and why."""
    for finding, reason in left[:MAX_LEFT]:
        typer.secho(f"not applied: {finding.place} [{finding.rule}]: {reason}", err=True)
    if len(left) > MAX_LEFT:
        typer.secho(f"not applied: {len(left) - MAX_LEFT} more", err=True)


def print_machine_readable(report: Report, as_sarif: bool) -> None:
    import json

    from halfstep import __version__
    from halfstep.align.as_json import as_dict
    from halfstep.align.sarif import sarif

    content = sarif(report.findings, __version__) if as_sarif else as_dict(report)
    typer.echo(json.dumps(content, indent=2, ensure_ascii=False))
    print_unreadable(report)
