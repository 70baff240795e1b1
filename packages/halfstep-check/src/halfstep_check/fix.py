"""`--fix` and `--write`: the edits of all findings as a patch, or in place with a backup. Comments stay as they are."""

from __future__ import annotations

import ast
import codecs
import difflib
import shutil
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from halfstep_check.findings import Edit, Finding, find_line_starts
from halfstep_check.shared.errors import ConfigError

BACKUP_SUFFIX = ".before-halfstep"


@dataclass(kw_only=True)
class Changes:
    """What the edits of all findings make of each file, and which findings no edit was made for, with the reason."""

    edits: dict[str, list[Edit]] = field(default_factory=dict)
    left: list[tuple[Finding, str]] = field(default_factory=list)


def collect_changes(findings: Iterable[Finding], allowed: Collection[str] | None = None) -> Changes:
    """Return all edits of a finding or none; of two that touch the same text the first is kept."""
    found = Changes()
    for finding in findings:
        if not finding.edits:
            found.left.append((finding, "no edit is certain to be right"))
        elif allowed is not None and any(edit.path not in allowed for edit in finding.edits):
            found.left.append((finding, "its file was not named"))
        elif any(do_clash(edit, other) for edit in finding.edits for other in found.edits.get(edit.path, [])):
            found.left.append((finding, "another finding changes the same text"))
        else:
            for edit in dict.fromkeys(finding.edits):
                found.edits.setdefault(edit.path, []).append(edit)
    return found


def do_clash(one: Edit, other: Edit) -> bool:
    if one == other:
        return False
    return one.start < other.end and other.start < one.end or one.start == other.start


def apply_edits(text: str, edits: Iterable[Edit]) -> str:
    """Return the text with every edit made, from the end so that positions stay true."""
    starts = find_line_starts(text)
    for edit in sorted(edits, reverse=True):
        first = starts[edit.start[0] - 1] + edit.start[1]
        last = starts[edit.end[0] - 1] + edit.end[1]
        text = text[:first] + edit.replacement + text[last:]
    return text


def make_patch(path: str, before: str, after: str) -> str:
    """Return a unified diff that `git apply` and `patch` understand."""
    diff = difflib.unified_diff(before.splitlines(keepends=True), after.splitlines(keepends=True), path, path)
    return "".join(line if line.endswith("\n") else line + "\n" for line in diff)


def apply_checked(name: str, text: str, edits: Iterable[Edit]) -> str:
    """Return the file with its edits; a script that would not parse afterwards is refused, whatever went wrong."""
    after = apply_edits(text, dict.fromkeys(edits))
    if name.endswith(".py"):
        try:
            ast.parse(after)
        except SyntaxError as error:
            raise ConfigError(
                f"{name}:{error.lineno}: the edits would leave a file that is not Python",
                why=str(error.msg),
                fix="make the changes by hand; the file was not touched",
            ) from error
    return after


def make_patches(edits: Mapping[str, list[Edit]], texts: Mapping[str, str]) -> str:
    """Return the patch over all files that edits touch."""
    return "".join(
        make_patch(path, texts[path], apply_checked(path, texts[path], edits[path])) for path in sorted(edits)
    )


def write(edits: Mapping[str, list[Edit]]) -> list[str]:
    """Apply the edits, each file after a backup; returns what was written."""
    written = []
    for name, own in sorted(edits.items()):
        path = Path(name)
        try:
            data = path.read_bytes()
            mark = codecs.BOM_UTF8 if data.startswith(codecs.BOM_UTF8) else b""
            after = apply_checked(name, data.removeprefix(mark).decode(), own)
            shutil.copy2(path, path.with_name(path.name + BACKUP_SUFFIX))
            path.write_bytes(mark + after.encode())
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot write {name}: {error}", fix="check that the file can be written") from error
        written.append(name)
    return written
