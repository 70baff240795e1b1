"""File names by pattern: `training/images/{id}_training` finds 21_training.tif, whose id is 21.

{id}   what the names of an image and its mask share; several times in one pattern it is the same each time
**/    any folders in between, which become part of the id
*      anything within one name
.png   an ending; without one, every readable ending counts
/      at the end: a folder of files that together are one mask
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from halfstep.data.files import READABLE, natural_key

ID, ANY_FOLDERS = "{id}", "**"


@dataclass(frozen=True, slots=True)
class NamePattern:
    """Which files below a folder count, and the id of each."""

    text: str
    ending: str = ""
    """The only ending that counts, in lower case; empty: any readable one."""

    def with_ending(self, ending: str) -> NamePattern:
        """The same names with one ending, unless the pattern names its own; a leading dot may be missing."""
        wanted = f".{ending.lower().lstrip('.')}" if ending and not self._own_ending else self.ending
        return replace(self, ending=wanted)

    @property
    def base(self) -> str:
        """The folder up to the first part that varies."""
        parts = self.text.split("/")[:-1]
        fixed = next((k for k, part in enumerate(parts) if _varies(part)), len(parts))
        return "/".join(parts[:fixed]) or "."

    def found(self, root: Path) -> dict[str, list[Path]]:
        """All that fit by id, in natural order; several of one id differ in their ending, or in what `*` is."""
        files = sorted(self.each(root), key=lambda one: natural_key(one[1].relative_to(root).as_posix()))
        by_id: dict[str, list[Path]] = {}
        for name, path in files:
            by_id.setdefault(name, []).append(path)
        return by_id

    def each(self, root: Path) -> Iterator[tuple[str, Path]]:
        """Ids and paths as the folders list them."""
        *folders, last = self.text.removesuffix("/").split("/")
        wants_folder = self.text.endswith("/")
        for above, name, folder in _below(root, folders, "", None):
            for entry in _entries(folder, _stem_of(last)):
                if entry.is_dir() if wants_folder else self._is_wanted(entry):
                    fits = _fit(_stem_of(last), entry.name if wants_folder else entry.stem, name)
                    if fits is not None:
                        yield above + (fits or ""), entry

    def _is_wanted(self, path: Path) -> bool:
        ending = path.suffix.lower()
        wanted = self._own_ending or self.ending
        return (ending == wanted if wanted else ending in READABLE) and path.is_file()

    @property
    def _own_ending(self) -> str:
        return _ending_of(self.text.rpartition("/")[2])


def _below(folder: Path, parts: list[str], above: str, name: str | None) -> Iterator[tuple[str, str | None, Path]]:
    """The folders that fit the pattern's folders: what `**` stood for, the id if it is known by then, the folder."""
    if not parts:
        yield above, name, folder
        return
    head, *rest = parts
    if head == ANY_FOLDERS:
        yield from _below(folder, rest, above, name)
        for inner in _entries(folder, "*"):
            if inner.is_dir():
                yield from _below(inner, parts, f"{above}{inner.name}/", name)
        return
    for inner in _entries(folder, head):
        fits = _fit(head, inner.name, name)
        if fits is not None and inner.is_dir():
            yield from _below(inner, rest, above, fits or None)


def _entries(folder: Path, part: str) -> list[Path]:
    """What lies in a folder, hidden files aside; one entry where the pattern's part is a plain folder name."""
    if part in ("", "."):
        return [folder]
    if not _varies(part) and (folder / part).is_dir():
        return [folder / part]
    return [path for path in folder.iterdir() if not path.name.startswith(".")] if folder.is_dir() else []


def _fit(part: str, name: str, known: str | None) -> str | None:
    """The id that makes a name fit a part of the pattern (empty where the part has none), or None."""
    if part in ("", "."):
        return known or ""
    if not _varies(part):
        return (known or "") if part == name else None
    pieces = re.split(r"(\{id\}|\*)", part)
    expressions = {ID: re.escape(known) if known else "(?P<id>.+?)", "*": ".*"}
    text, has_id = "", False
    for piece in pieces:
        text += "(?P=id)" if piece == ID and has_id and not known else expressions.get(piece, re.escape(piece))
        has_id = has_id or piece == ID
    match = re.fullmatch(text, name, re.DOTALL)
    if match is None:
        return None
    return known or match.groupdict().get("id") or ""


def _varies(part: str) -> bool:
    return ID in part or "*" in part


def _ending_of(name: str) -> str:
    ending = PurePosixPath(name).suffix.lower()
    return ending if ending in READABLE else ""


def _stem_of(name: str) -> str:
    is_ending = _ending_of(name) or name.endswith(".*")
    return name.rpartition(".")[0] if is_ending else name
