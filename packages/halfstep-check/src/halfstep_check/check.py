"""`check`: files in, a report out. Reads configs and scripts, resolves what runs, and lists what is wrong."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from halfstep_check import files, links
from halfstep_check.declarations import Reference, Source
from halfstep_check.dialects import command_line, environment
from halfstep_check.findings import Finding, Ignores, Place, Severity
from halfstep_check.hardware_gap import Device, find_hardware_gaps
from halfstep_check.reading import FileReading, read_file, read_found, resolve_links
from halfstep_check.resolve import Effective, find_conflicts, resolve_effective
from halfstep_check.rules import RULES, get_severity
from halfstep_check.runs import group_runs
from halfstep_check.shared.config_text import is_import_path
from halfstep_check.shared.errors import ConfigError, HalfstepError, suggest_nearest
from halfstep_check.traps import find_traps

MAX_FOLLOWED = 20
"""Files opened because another one names them; a launcher file and its DeepSpeed JSON are two."""
_GAP = r"[ \t]{0,4}"
# Every repeat is bounded: these files come from anywhere, and open repeats side by side take quadratic time.
_PIN = re.compile(
    rf"""(?:pytorch[-_])?lightning["']?(?:\[[\w,-]{{0,40}}\])?{_GAP}(?:[=:]{_GAP})?["']?{_GAP}"""
    rf"""(?:[=~^><!]=?{_GAP}){{0,3}}v?(\d+(?:\.\d+){{0,3}})""",
    re.IGNORECASE,
)
_LOCKED = re.compile(r'name\s*=\s*"(?:pytorch-)?lightning"\s*\nversion\s*=\s*"(\d+(?:\.\d+)*)"')

LoadOwn = Callable[[Path], object]
"""Reads a halfstep config as training would, or raises."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """Everything one check found."""

    sources: tuple[Source, ...] = ()
    effective: tuple[Effective, ...] = ()
    findings: tuple[Finding, ...] = ()
    unreadable: tuple[HalfstepError, ...] = ()
    silent: tuple[str, ...] = ()
    """Files named by the user in no known dialect."""
    unvalidated: tuple[str, ...] = ()
    """halfstep configs that were read without halfstep, so without its schema."""
    skipped: tuple[str, ...] = ()
    """Files of a folder or project that could not be read, such as templates: reported, without an exit code."""
    num_scripts: int = 0
    num_ignored: int = 0

    @property
    def exit_code(self) -> int:
        """0 aligned (information alone does not count), 1 findings, 2 input that could not be read."""
        if self.unreadable:
            return 2
        return int(any(get_severity(finding) is not Severity.INFO for finding in self.findings))


@dataclass(kw_only=True, slots=True)
class Reading:
    """What is collected while files are read, one after the other."""

    load_own: LoadOwn | None = None
    named: list[Source] = field(default_factory=list)
    found: list[Source] = field(default_factory=list)
    links: dict[Path, list[Path]] = field(default_factory=dict)
    lint: list[Finding] = field(default_factory=list)
    unreadable: list[HalfstepError] = field(default_factory=list)
    silent: list[str] = field(default_factory=list)
    unvalidated: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    ignores: dict[str, Ignores] = field(default_factory=dict)
    num_scripts: int = 0

    def take(self, path: Path, read: FileReading) -> list[Source]:
        self.ignores[str(path)] = read.ignores
        self.lint += [*read.lint, *find_unknown_ignores(path, read.ignores)]
        self.num_scripts += read.is_script
        return read.sources


def check(
    paths: Sequence[Path],
    *,
    project: Path | None = None,
    variables: Mapping[str, str] | None = None,
    commands: Sequence[str] = (),
    device: Device | None = None,
    load_own: LoadOwn | None = None,
    rules: Collection[str] | None = None,
) -> Report:
    """Check the files named, what a project folder holds, environment variables and command lines, together.

    `rules` are the names of those that count; None for all.
    """
    reading = Reading(load_own=load_own)
    if project is not None and not os.path.isdir(project):
        reading.unreadable.append(ConfigError(f"--project {project}: no such folder", fix="check the path"))
    texts = {path: text for path in list_named_files(paths) if (text := read_if_possible(path, reading)) is not None}
    below = [path for folder in paths if os.path.isdir(folder) for path in files.list_scripts(folder)]
    below += list(files.list_project_files(project)) if project else []
    found = [path for path in dict.fromkeys(below) if path not in texts]
    version = find_pinned_lightning(texts, found)
    for path, text in texts.items():
        read_named(path, text, version, reading)
    read_project(found, version, project, reading)
    reading.named += [
        s for c in commands for s in command_line.read_commands(c, "command line", lightning_version=version)
    ]
    reading.named += [environment.read(variables)] if variables is not None else []
    follow(reading, {path.resolve() for path in (*texts, *found)}, version)
    return report(reading, device, rules)


def read_project(found: Sequence[Path], version: str, project: Path | None, reading: Reading) -> None:
    names: dict[str, list[str]] = {}
    for path, read in read_found(found, version):
        if isinstance(read, HalfstepError):
            reading.skipped.append(read.what)
            continue
        reading.found += reading.take(path, read)
        names |= read.names
    if project is not None:
        reading.links = resolve_links(
            names, links.normalise_path(project), [links.normalise_path(path) for path in found]
        )


def list_named_files(paths: Sequence[Path]) -> list[Path]:
    return [path for path in dict.fromkeys(paths) if not os.path.isdir(path)]


def read_if_possible(path: Path, reading: Reading) -> str | None:
    """Return the text of a file that the user named; one that cannot be read goes into the report."""
    try:
        return files.read_text(path)
    except ConfigError as error:
        reading.unreadable.append(error)
        return None


def find_pinned_lightning(texts: Mapping[Path, str], found: Sequence[Path]) -> str:
    named = [text for path, text in texts.items() if path.name in files.PIN_FILES]
    pins = [
        *named,
        *(text for path in found if path.name in files.PIN_FILES and (text := files.read_text_or_none(path))),
    ]
    return next(filter(None, map(read_lightning_version, pins)), "")


def read_named(path: Path, text: str, version: str, reading: Reading) -> None:
    try:
        read = read_file(path, text, version)
    except HalfstepError as error:
        reading.unreadable.append(error)
        return
    sources = reading.take(path, read)
    reading.named += sources
    reading.unreadable += collect_refusals(path, read, reading.load_own)
    reading.unvalidated += [str(path)] if read.workload and reading.load_own is None else []
    is_quiet = not sources and path.suffix != ".py" and path.name not in files.PIN_FILES
    reading.silent += [str(path)] if is_quiet else []


def collect_refusals(path: Path, read: FileReading, load_own: LoadOwn | None) -> list[HalfstepError]:
    """Return the error training would raise for a halfstep config; custom workloads are not imported for this."""
    found = [finding for source in read.sources for finding in source.findings]
    has_findings = any(get_severity(finding) is not Severity.INFO for finding in found)
    may_be_code = is_import_path(read.workload) or "${" in read.workload  # a reference may name an import path
    if load_own is None or has_findings or not read.workload or may_be_code:
        return []
    try:
        load_own(path)
    except HalfstepError as error:
        return [error]
    return []


def follow(reading: Reading, known: set[Path], version: str) -> None:
    """Open the files that named sources name, and those that these name; each once, and never very many."""
    waiting = [reference for source in reading.named for reference in source.references]
    for _ in range(MAX_FOLLOWED):
        if not waiting:
            return
        reference = waiting.pop(0)
        path = find_referenced_file(reference)
        if path is None:
            reading.lint.append(report_missing_file(reference))
        elif path.resolve() not in known:
            known.add(path.resolve())
            waiting += follow_one(path, reference, version, reading)


def follow_one(path: Path, reference: Reference, version: str, reading: Reading) -> list[Reference]:
    before = len(reading.named)
    text = read_if_possible(path, reading)
    if text is not None:
        read_named(path, text, version, reading)
    opened = [dataclasses.replace(source, named_by=reference.place) for source in reading.named[before:]]
    reading.named[before:] = opened
    return [inner for source in opened for inner in source.references]


def report(reading: Reading, device: Device | None, rules: Collection[str] | None) -> Report:
    runs = group_runs(reading.named, reading.found, reading.links)
    findings = [*reading.lint, *(finding for source in reading.named + reading.found for finding in source.findings)]
    for run in runs:
        findings += [*find_conflicts(run), *find_traps(run), *(find_hardware_gaps(run, device) if device else [])]
    if any(keeps_fp32_masters(source) for run in runs for source in run):
        findings = [finding for finding in findings if not finding.unless_accelerate_shards]
    # A line that another finding asks to delete is not aligned as well.
    refused = {finding.place for finding in findings if finding.rule == "launch-refused"}
    findings = [
        replace(finding, edits=()) if finding.place in refused and finding.rule != "launch-refused" else finding
        for finding in findings
    ]
    selected = [finding for finding in findings if rules is None or finding.rule in rules]
    kept, num_ignored = drop_ignored(selected, reading.ignores)
    return Report(
        sources=tuple(source for source in reading.named + reading.found if source.dialect != "script"),
        effective=resolve_effective(runs[0]) if len(runs) == 1 else (),
        findings=tuple(kept),
        unreadable=tuple(reading.unreadable),
        silent=tuple(reading.silent),
        unvalidated=tuple(reading.unvalidated),
        skipped=tuple(reading.skipped),
        num_scripts=reading.num_scripts,
        num_ignored=num_ignored,
    )


def keeps_fp32_masters(source: Source) -> bool:
    """Return whether accelerate is configured to shard in mixed precision: prepare() then keeps the weights in fp32."""
    shards = source.dialect.startswith("accelerate") and source.facts.get("strategy") in ("fsdp", "deepspeed")
    return shards and source.get_value("precision") in ("bf16", "fp16", "fp8")


def drop_ignored(findings: Iterable[Finding], ignores: Mapping[str, Ignores]) -> tuple[list[Finding], int]:
    unique = sorted(dict.fromkeys(findings), key=lambda f: (f.place, f.rule, f.message))
    kept = [f for f in unique if f.place.path not in ignores or not ignores[f.place.path].silence(f)]
    return kept, len(unique) - len(kept)


def find_unknown_ignores(path: Path, ignores: Ignores) -> Iterator[Finding]:
    """Report names in `# halfstep: ignore[...]` that are no rule, and so silence nothing."""
    for line, name in ignores.written:
        if name not in RULES and name != "*":
            message, fix = f"no rule is named {name!r}: this comment silences nothing", suggest_nearest(name, RULES)
            yield Finding(rule="unknown-ignore", message=message, place=Place(path=str(path), line=line), fix=fix)


def find_referenced_file(reference: Reference) -> Path | None:
    """Return the file meant: next to the one that names it, or from the working directory, as the frameworks look.

    `os.path` takes any name, also one too long for a file; reading a pipe or device would wait forever.
    """
    sibling = Path(reference.place.path).parent / reference.name
    return next((path for path in (sibling, Path(reference.name)) if os.path.isfile(path)), None)


def report_missing_file(reference: Reference) -> Finding:
    folder = Path(reference.place.path).parent
    looked = "in the working directory" if str(folder) == "." else f"in {folder} or the working directory"
    return Finding(
        rule="missing-file",
        message=f"{reference.spelled}: no such file {looked}, so it was not checked",
        place=reference.place,
        fix="correct the path, or name the file on the command line of check",
    )


def read_lightning_version(text: str) -> str:
    """Return the Lightning version that a requirements, pyproject or lock file pins; empty when it pins none."""
    found = _LOCKED.search(text) or _PIN.search(text)
    return found.group(1) if found else ""
