"""Which sources belong to one run: only those can contradict each other."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from halfstep_check.declarations import Source
from halfstep_check.dialects import command_line
from halfstep_check.links import list_reached

Links = Mapping[Path, Collection[Path]]


def group_runs(named: Sequence[Source], found: Sequence[Source], links: Links) -> list[list[Source]]:
    """Return all that was named is one run, each command of it its own; what a project holds is a run where links join
    it."""
    runs = group_named_runs(named) if named else []
    everywhere = [source for source in named if source.dialect == "environment"]
    return [*runs, *([*everywhere, *run] for run in group_linked_runs(found, links))] or [[]]


def group_named_runs(named: Sequence[Source]) -> list[list[Source]]:
    commands: dict[tuple[str, int] | None, list[Source]] = {}
    for source in named:
        commands.setdefault(get_command(source), []).append(source)
    rest = commands.pop(None, [])
    return [[*rest, *command] for command in commands.values()] or [rest]


def get_command(source: Source) -> tuple[str, int] | None:
    """Return which command of which shell script this is; two commands of one script are two runs."""
    line = source.facts.get(command_line.COMMAND_LINE)
    return (source.name, int(line)) if line else None


def group_linked_runs(found: Sequence[Source], links: Links) -> list[list[Source]]:
    """Return one run for every command, and for every file that no other one names and that names others."""
    by_file: dict[Path, list[Source]] = {}
    for source in found:
        by_file.setdefault(Path(source.name), []).append(source)
    commands = [source for source in found if get_command(source) is not None]
    started = {
        get_command(source): [s for s in commands if get_command(s) == get_command(source)] for source in commands
    }
    runs = [build_run(group, list_targets(group, links), by_file, links) for group in started.values()]
    taken = {source.name for run in runs for source in run}
    linked_to = {target for targets in links.values() for target in targets}
    known = {*map(Path, taken), *map(get_place, commands)}
    starts = [path for path in dict.fromkeys([*by_file, *links]) if path not in linked_to and path not in known]
    runs += [build_run(by_file.get(path, []), links.get(path, ()), by_file, links) for path in starts]
    return [run for run in runs if run]


def list_targets(command: Sequence[Source], links: Links) -> list[Path]:
    return [target for source in command for target in links.get(get_place(source), ())]


def get_place(source: Source) -> Path:
    """Return the file or line whose links a source uses: two commands of one script name different files."""
    line = source.facts.get(command_line.COMMAND_LINE)
    return Path(f"{source.name}:{line}") if line else Path(source.name)


def build_run(
    own: Sequence[Source], targets: Collection[Path], by_file: Mapping[Path, Sequence[Source]], links: Links
) -> list[Source]:
    """Return what a start says itself and what it reaches; several files that say the same kind of thing are
    choices."""
    paths = dict.fromkeys(path for target in targets for path in list_reached(target, links))
    # A config that names another of its kind builds on it: what it says itself is meant to differ.
    said = {source.dialect for source in own if source.dialect != "script"}
    reachable = [source for path in paths for source in by_file.get(path, ()) if get_command(source) is None]
    others = [source for source in reachable if source.dialect not in said]
    files = {dialect: {s.name for s in others if s.dialect == dialect} for dialect in {s.dialect for s in others}}
    direct = {str(target) for target in targets}
    return [*own, *(s for s in others if len(files[s.dialect]) == 1 and (s.dialect != "script" or s.name in direct))]
