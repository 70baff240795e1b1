"""`check`: files in, a report out. Reads configs and scripts, resolves what runs, and lists what is wrong."""

from __future__ import annotations

import ast
import dataclasses
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from halfstep.align import files, references
from halfstep.align.dialects import command_line, environment, source_of
from halfstep.align.document import read_document
from halfstep.align.findings import Finding, Severity
from halfstep.align.hardware_gap import Device, hardware_gaps
from halfstep.align.ignore import Ignores
from halfstep.align.resolve import Effective, conflicts, effective
from halfstep.align.rules import severity_of
from halfstep.align.runs import runs_of
from halfstep.align.statements import Reference, Source
from halfstep.align.traps import traps
from halfstep.align.versions import lightning_version
from halfstep.errors import ConfigError, HalfstepError


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """Everything one check found."""

    sources: tuple[Source, ...] = ()
    effective: tuple[Effective, ...] = ()
    findings: tuple[Finding, ...] = ()
    unreadable: tuple[HalfstepError, ...] = ()
    silent: tuple[str, ...] = ()
    """Files named by the user that speak no dialect we know."""
    num_scripts: int = 0
    num_ignored: int = 0

    @property
    def exit_code(self) -> int:
        """0 aligned (information alone does not count), 1 findings, 2 input that could not be read."""
        if self.unreadable:
            return 2
        return int(any(severity_of(finding.rule) is not Severity.INFO for finding in self.findings))


@dataclass(kw_only=True, slots=True)
class Reading:
    """What is collected while files are read, one after the other."""

    named: list[Source] = field(default_factory=list)
    found: list[Source] = field(default_factory=list)
    lint: list[Finding] = field(default_factory=list)
    unreadable: list[HalfstepError] = field(default_factory=list)
    silent: list[str] = field(default_factory=list)
    ignores: dict[str, Ignores] = field(default_factory=dict)
    num_scripts: int = 0


def check(
    paths: Sequence[Path],
    *,
    project: Path | None = None,
    variables: Mapping[str, str] | None = None,
    commands: Sequence[str] = (),
    device: Device | None = None,
) -> Report:
    """Check the files named, what a project folder holds, environment variables and command lines, together."""
    reading = Reading()
    if project is not None and not files.is_folder(project):
        reading.unreadable.append(ConfigError(f"--project {project}: no such folder", fix="check the path"))
    texts = {path: text for path in named_files(paths) if (text := readable(path, reading)) is not None}
    below = [path for folder in paths if files.is_folder(folder) for path in files.scripts_below(folder)]
    below += list(files.project_files(project)) if project else []
    found = {path: text for path in below if path not in texts and (text := readable(path, reading, named=False))}
    version = pinned_lightning({**found, **texts})
    for path, text in texts.items():
        read_named(path, text, version, reading)
    for path, text in found.items():
        read_found(path, text, version, reading)
    reading.named += [
        s for c in commands for s in command_line.sources_of(c, "command line", lightning_version=version)
    ]
    reading.named += [environment.read(variables)] if variables is not None else []
    follow(reading, {path.resolve() for path in (*texts, *found)}, version)
    return report(reading, device)


def named_files(paths: Sequence[Path]) -> list[Path]:
    return [path for path in dict.fromkeys(paths) if not files.is_folder(path)]


def readable(path: Path, reading: Reading, *, named: bool = True) -> str | None:
    """The text of a file; what the user named and cannot be read goes into the report, what we found is passed over."""
    try:
        return files.read_text(path)
    except ConfigError as error:
        reading.unreadable += [error] if named else []
        return None


def pinned_lightning(texts: Mapping[Path, str]) -> str:
    pins = [lightning_version(text) for path, text in texts.items() if path.name in files.PIN_FILES]
    return next(filter(None, pins), "")


def read_named(path: Path, text: str, version: str, reading: Reading) -> None:
    before = len(reading.named)
    try:
        reading.named += read_sources(path, text, version, reading)
    except HalfstepError as error:
        reading.unreadable.append(error)
        return
    is_quiet = len(reading.named) == before and path.suffix != ".py" and path.name not in files.PIN_FILES
    reading.silent += [str(path)] if is_quiet else []


def follow(reading: Reading, known: set[Path], version: str) -> None:
    """Open the files that named sources name, and those that these name; each once, and never very many."""
    waiting = [reference for source in reading.named for reference in source.references]
    for _ in range(references.MAX_FOLLOWED):
        if not waiting:
            return
        reference = waiting.pop(0)
        path = references.file_of(reference)
        if path is None:
            reading.lint.append(references.missing(reference))
        elif path.resolve() not in known:
            known.add(path.resolve())
            waiting += follow_one(path, reference, version, reading)


def follow_one(path: Path, reference: Reference, version: str, reading: Reading) -> list[Reference]:
    before = len(reading.named)
    text = readable(path, reading)
    if text is not None:
        read_named(path, text, version, reading)
    opened = [dataclasses.replace(source, named_by=reference.place) for source in reading.named[before:]]
    reading.named[before:] = opened
    return [inner for source in opened for inner in source.references]


def read_found(path: Path, text: str, version: str, reading: Reading) -> None:
    try:
        reading.found += read_sources(path, text, version, reading)
    except HalfstepError:
        return  # not named by the user: a template or a test file that is no config at all


def read_sources(path: Path, text: str, version: str, reading: Reading) -> list[Source]:
    name = str(path)
    reading.ignores[name] = Ignores(text)
    if path.suffix == ".py":
        return read_script(text, name, version, reading)
    if path.suffix in files.SHELL_SUFFIXES:
        return command_line.sources_of(text, name, lightning_version=version)
    if path.suffix in (".txt", ".lock"):
        return []
    if path.suffix not in ("", *files.CONFIG_SUFFIXES):
        kinds = "YAML, JSON, TOML, Python and shell files"
        raise ConfigError(
            f"{name}: not a kind of file that check reads", why=f"it reads {kinds}", fix="name one of those"
        )
    source = source_of(read_document(text, name), lightning_version=version)
    return [source] if source is not None else []


def read_script(text: str, name: str, version: str, reading: Reading) -> list[Source]:
    # Imported here: comparing two configs should not wait for the lint.
    from halfstep.align.dialects import python_calls
    from halfstep.align.lint import lint_tree

    tree = parse_script(text, name)
    reading.num_scripts += 1
    reading.lint += lint_tree(tree, text, name)
    return python_calls.sources_of(tree, text, name, lightning_version=version)


def parse_script(text: str, name: str) -> ast.Module:
    try:
        with warnings.catch_warnings():
            # Invalid escapes in a script are the script's business.
            warnings.simplefilter("ignore")
            return ast.parse(text)
    except SyntaxError as error:
        raise ConfigError(f"{name}:{error.lineno or 1}: not Python: {error.msg}", fix="correct the file") from error
    except (ValueError, RecursionError, MemoryError) as error:
        raise ConfigError(f"{name}: not Python: {error}", fix="correct the file") from error


def report(reading: Reading, device: Device | None) -> Report:
    runs = list(runs_of(reading.named, reading.found))
    findings = [*reading.lint, *(finding for source in reading.named + reading.found for finding in source.findings)]
    for run in runs:
        findings += [*conflicts(run), *traps(run), *(hardware_gaps(run, device) if device else [])]
    kept, num_ignored = without_ignored(findings, reading.ignores)
    return Report(
        sources=tuple(source for source in reading.named + reading.found if source.dialect != "script"),
        effective=effective(runs[0]) if len(runs) == 1 else (),
        findings=tuple(kept),
        unreadable=tuple(reading.unreadable),
        silent=tuple(reading.silent),
        num_scripts=reading.num_scripts,
        num_ignored=num_ignored,
    )


def without_ignored(findings: Iterable[Finding], ignores: Mapping[str, Ignores]) -> tuple[list[Finding], int]:
    unique = sorted(dict.fromkeys(findings), key=lambda f: (f.place, f.rule, f.message))
    kept = [f for f in unique if f.place.path not in ignores or not ignores[f.place.path].silence(f)]
    return kept, len(unique) - len(kept)
