"""Which sources belong to one run: only those can contradict each other."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from halfstep.align.dialects import command_line
from halfstep.align.statements import Source


def runs_of(named: Sequence[Source], found: Sequence[Source]) -> Iterable[list[Source]]:
    """Which sources belong to one run: all that were named; what is found in many scripts or configs is many runs."""
    commands: dict[tuple[str, int] | None, list[Source]] = {}
    for source in named:
        commands.setdefault(command_of(source), []).append(source)
    rest = commands.pop(None, [])
    if len(commands) > 1:
        return [run for command in commands.values() for run in runs_of([*rest, *command], found)]
    scripts = {source.name for source in found if source.dialect == "script"}
    # Which of several scripts a config belongs to is not known; then what they do by hand says nothing about it.
    by_hand = [source for source in found if source.dialect == "script" and len(scripts) == 1]
    settings = [source for source in found if source.dialect != "script"]
    dialects = [source.dialect for source in [*named, *settings]]
    files_with_calls = {source.name for source in settings if source.name.endswith(".py")}
    common, alternatives = [*named, *by_hand], dict[str, list[Source]]()
    for source in settings:
        if dialects.count(source.dialect) > 1 or (source.name in files_with_calls and len(files_with_calls) > 1):
            alternatives.setdefault(source.name, []).append(source)
        else:
            common.append(source)
    return [[*common, *alternative] for alternative in alternatives.values()] or [common]


def command_of(source: Source) -> tuple[str, int] | None:
    """Which command of which shell script this is; two commands of one script are two runs."""
    line = source.facts.get(command_line.COMMAND_LINE)
    return (source.name, int(line)) if line else None
