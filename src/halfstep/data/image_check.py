"""Finding bad picture files before the first epoch rather than in the middle of one."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from halfstep.data.decode import check_picture, open_picture
from halfstep.data.files import BadFiles
from halfstep.data.image_folder import ImageFolder
from halfstep.errors import DataError

END_BYTES = 4096
"""Cameras and editors append up to this much after the picture's end marker."""


def check_images(folder: ImageFolder, *, bad_files: BadFiles) -> ImageFolder:
    """The folder without its bad files, each of which is reported.

    To stop at the first bad file, headers and ends of files are enough: they show what is not a picture and what was
    cut short. To leave bad files out, every one is decoded, since only that finds them all.
    """
    found = _errors(folder.train.paths + folder.val.paths, deep=bad_files.mode == "skip")
    for error in found.values():
        bad_files.report(error)
    if not found:
        return folder
    bad = set(found)
    kept = dataclasses.replace(folder, train=folder.train.without(bad), val=folder.val.without(bad))
    lost = [name for number, name in enumerate(folder.classes) if number not in set(kept.train.labels)]
    if lost:
        raise DataError(f"no readable training picture in class {', '.join(lost)}", why=next(iter(found.values())).what)
    bad_files.refuse_empty_validation(len(folder.val), len(kept.val))
    return kept


def check_header_and_end(path: Path) -> None:
    """Refuse what is not a picture or ends too early, without decoding the others."""
    with open_picture(path), path.open("rb") as file:
        start = file.read(12)
        length = file.seek(0, os.SEEK_END)
        file.seek(max(0, length - END_BYTES))
        end = file.read()
    if not _is_whole(start, end, length):
        check_picture(path)  # cut short, or only followed by something long


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
