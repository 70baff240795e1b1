"""`--fix` and `--write`: the edits of all findings as a patch, or in place with a backup. Comments stay as they are."""

from __future__ import annotations

import codecs
import difflib
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

from halfstep.align.findings import Edit, Finding
from halfstep.align.textlines import line_starts
from halfstep.errors import ConfigError

BACKUP_SUFFIX = ".before-halfstep"


def edits_by_file(findings: Iterable[Finding]) -> dict[str, list[Edit]]:
    """All edits, each once; where two overlap the first stands."""
    by_file: dict[str, list[Edit]] = {}
    for finding in findings:
        for edit in finding.edits:
            kept = by_file.setdefault(edit.path, [])
            if not any(
                edit.start < other.end and other.start < edit.end or edit.start == other.start for other in kept
            ):
                kept.append(edit)
    return by_file


def apply_edits(text: str, edits: Iterable[Edit]) -> str:
    """The text with every edit made, from the end so that positions stay true."""
    starts = line_starts(text)
    for edit in sorted(edits, reverse=True):
        first = starts[edit.start[0] - 1] + edit.start[1]
        last = starts[edit.end[0] - 1] + edit.end[1]
        text = text[:first] + edit.replacement + text[last:]
    return text


def patch(path: str, before: str, after: str) -> str:
    """A unified diff that `git apply` and `patch` understand."""
    diff = difflib.unified_diff(before.splitlines(keepends=True), after.splitlines(keepends=True), path, path)
    return "".join(line if line.endswith("\n") else line + "\n" for line in diff)


def patches(findings: Iterable[Finding], texts: Mapping[str, str]) -> str:
    """The patch over all files that edits touch."""
    changed = edits_by_file(findings)
    return "".join(patch(path, texts[path], apply_edits(texts[path], changed[path])) for path in sorted(changed))


def write(findings: Iterable[Finding], allowed: Iterable[str]) -> list[str]:
    """Apply the edits to the files the user named, each after a backup; returns what was written."""
    named = set(allowed)
    written = []
    for name, edits in sorted(edits_by_file(findings).items()):
        if name not in named:
            continue
        path = Path(name)
        try:
            data = path.read_bytes()
            mark = codecs.BOM_UTF8 if data.startswith(codecs.BOM_UTF8) else b""
            shutil.copy2(path, path.with_name(path.name + BACKUP_SUFFIX))
            path.write_bytes(mark + apply_edits(data.removeprefix(mark).decode(), edits).encode())
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot write {name}: {error}", fix="check that the file can be written") from error
        written.append(name)
    return written
