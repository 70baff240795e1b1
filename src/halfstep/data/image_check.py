"""Finding bad picture files before the first epoch rather than in the middle of one."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from halfstep.data.decode import check_picture, open_picture
from halfstep.data.files import BadFiles
from halfstep.data.image_folder import ImageFolder
from halfstep.data.packed import fingerprint_of
from halfstep.errors import DataError

CHECK_NOTE = ".halfstep_checked.json"
"""Beside the data, so that a large folder is decoded for checking once."""


def check_images(folder: ImageFolder, *, bad_files: BadFiles) -> ImageFolder:
    """The folder without its bad files, each of which is reported.

    To stop at the first bad file, headers and ends of files are enough: they show what is no picture and what was
    cut short. To leave bad files out, every one is decoded, since only that finds them all; the result is remembered.
    """
    paths = folder.train.paths + folder.val.paths
    if bad_files.mode == "error":
        found = _errors(paths, deep=False)
    else:
        remembered = _remembered(folder)
        found = _errors(paths, deep=True) if remembered is None else remembered
        _remember(folder, found)
    for error in found.values():
        bad_files.report(error)
    if not found:
        return folder
    bad = set(found)
    kept = dataclasses.replace(folder, train=folder.train.without(bad), val=folder.val.without(bad))
    lost = [name for number, name in enumerate(folder.classes) if number not in set(kept.train.labels)]
    if lost:
        raise DataError(f"no readable training picture in class {', '.join(lost)}", why=next(iter(found.values())).what)
    return kept


def check_header_and_end(path: Path) -> None:
    """Refuse what is no picture or ends too early, without decoding it."""
    with open_picture(path), path.open("rb") as file:
        start = file.read(12)
        length = file.seek(0, os.SEEK_END)
        file.seek(max(0, length - END_BYTES))
        end = file.read()
    if not _is_whole(start, end, length):
        raise DataError(
            f"cannot read {path}",
            why=f"its {length:,} bytes end before the picture does",
            fix="replace the file, or leave bad files out: data.on_bad_file=skip",
        )


END_BYTES = 4096
"""Cameras and editors append up to this much after the picture's end marker."""


def _is_whole(start: bytes, end: bytes, length: int) -> bool:
    if start.startswith(b"\xff\xd8"):
        return b"\xff\xd9" in end
    if start.startswith(b"\x89PNG"):
        return b"IEND" in end
    if start.startswith(b"RIFF"):
        return length >= int.from_bytes(start[4:8], "little") + 8
    return True


def _errors(paths: Sequence[Path], *, deep: bool) -> dict[Path, DataError]:
    check = check_picture if deep else check_header_and_end

    def attempt(path: Path) -> DataError | None:
        try:
            check(path)
        except DataError as error:
            return error
        return None

    with ThreadPoolExecutor(os.cpu_count()) as threads:  # Pillow decodes without the interpreter's lock
        outcomes = zip(paths, threads.map(attempt, paths), strict=True)
        return {path: error for path, error in outcomes if error is not None}


def _remembered(folder: ImageFolder) -> dict[Path, DataError] | None:
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        note = json.loads((folder.root / CHECK_NOTE).read_text())
        if note["fingerprint"] == _fingerprint(folder):
            return {folder.root / name: DataError(what, why=why) for name, what, why in note["bad"]}
    return None


def _remember(folder: ImageFolder, found: dict[Path, DataError]) -> None:
    bad = [(path.relative_to(folder.root).as_posix(), error.what, error.why) for path, error in found.items()]
    with contextlib.suppress(OSError):  # a read-only folder only costs the check
        (folder.root / CHECK_NOTE).write_text(json.dumps({"fingerprint": _fingerprint(folder), "bad": bad}))


def _fingerprint(folder: ImageFolder) -> str:
    return fingerprint_of(folder.root, (folder.train.paths, folder.val.paths), {})
