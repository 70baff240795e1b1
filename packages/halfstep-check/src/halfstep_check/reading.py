"""One file at a time: what it says, what its code does wrong, and which other files it names. Safe to run in a pool."""

from __future__ import annotations

import ast
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from halfstep_check import files, links
from halfstep_check.declarations import Source
from halfstep_check.dialects import command_line, own, read_source
from halfstep_check.document import read_document
from halfstep_check.findings import Finding, Ignores
from halfstep_check.shared.errors import ConfigError, HalfstepError

POOL_FROM = 100
"""Fewer files are read sooner than a pool is started."""


@dataclass(kw_only=True, slots=True)
class FileReading:
    """What one file gave."""

    sources: list[Source] = field(default_factory=list)
    lint: list[Finding] = field(default_factory=list)
    ignores: Ignores
    is_script: bool = False
    names: dict[str, list[str]] = field(default_factory=dict)
    """Files it names, by what names them: the file itself, or `run.sh:12` for a command."""
    workload: str = ""
    """Of halfstep's own YAML configs."""


def read_found(paths: Sequence[Path], version: str) -> Iterator[tuple[Path, FileReading | HalfstepError]]:
    """Read files of a folder or project, in order; a file that cannot be read (a template, say) gives its error."""
    readings = read_in_pool(partial(read_quietly, version=version), paths)
    for path, reading in zip(paths, readings, strict=True):
        if reading is not None:
            yield path, reading


def read_in_pool(
    read: Callable[[Path], FileReading | HalfstepError | None], paths: Sequence[Path]
) -> Iterator[FileReading | HalfstepError | None]:
    workers = min(os.cpu_count() or 1, 8)
    if len(paths) < POOL_FROM or workers == 1:
        yield from map(read, paths)
        return
    with ProcessPoolExecutor(workers) as pool:
        yield from pool.map(read, paths, chunksize=8)


def read_quietly(path: Path, version: str) -> FileReading | HalfstepError | None:
    try:
        text = files.read_text(path)
        return read_file(path, text, version, lazily=True) if text else None
    except HalfstepError as error:
        return error


def read_file(path: Path, text: str, version: str, *, lazily: bool = False) -> FileReading:
    """Read one file; `lazily` skips parsing of scripts without anything relevant."""
    name = str(path)
    reading = FileReading(ignores=Ignores(text))
    if path.suffix == ".py":
        read_script(reading, text, name, version, lazily)
    elif path.suffix in files.SHELL_SUFFIXES:
        reading.sources = command_line.read_commands(text, name, lightning_version=version)
        reading.names = {f"{name}:{line}": named for line, named in command_line.list_named_files(text).items()}
    elif path.suffix in ("", *files.CONFIG_SUFFIXES):
        root = read_document(text, name)
        source = read_source(root, lightning_version=version)
        reading.sources = [source] if source is not None else []
        reading.names = {name: links.list_names_in_config(root)}
        if source is not None and source.dialect == own.NAME and path.suffix in (".yaml", ".yml"):
            reading.workload = str(root.scalar_at("workload"))
    elif path.suffix not in (".txt", ".lock"):
        kinds = "YAML, JSON, TOML, Python and shell files"
        raise ConfigError(
            f"{name}: not a kind of file that check reads", why=f"it reads {kinds}", fix="give one of those"
        )
    return reading


def read_script(reading: FileReading, text: str, name: str, version: str, lazily: bool) -> None:
    # Imported here: comparing two configs should not wait for the lint.
    from halfstep_check.dialects import python_calls
    from halfstep_check.lint import RELEVANT, lint_tree

    reading.is_script = True
    reading.names = {name: links.list_names_in_script(text)}
    if lazily and not RELEVANT.search(text) and not python_calls.RELEVANT.search(text):
        return
    tree = parse_script(text, name)
    reading.lint = lint_tree(tree, text, name)
    reading.sources = python_calls.read_script_sources(tree, text, name, lightning_version=version)


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


def resolve_links(names: Mapping[str, Sequence[str]], root: Path, known: Sequence[Path]) -> dict[Path, list[Path]]:
    """Return the names as files of the project; what is none of them is left out."""
    whole = set(known)
    found: dict[Path, list[Path]] = {}
    for who, wanted in names.items():
        start = Path(who)
        targets = [links.resolve(name, start, root, whole) for name in wanted]
        kept = [path for path in dict.fromkeys(targets) if path is not None and path != start]
        if kept:
            found[start] = kept
    return found
