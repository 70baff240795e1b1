"""Packing a folder: every image decoded and resized once, by threads, straight into the mapped file.

Threads and not processes: Pillow decodes and resizes without the interpreter's lock, and nothing has to be sent.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import numpy as np
from PIL import Image
from rich.console import Console
from rich.progress import Progress, TaskID

from halfstep.data.crops import Array
from halfstep.data.decode import open_picture
from halfstep.data.files import BadFiles, OnBadFile, naming_no_room, refuse_no_room
from halfstep.data.folder_samples import REDUCING_GAP, centre_square
from halfstep.data.image_folder import ImageFolder
from halfstep.data.loader import read_ahead
from halfstep.data.packed import Pack, PackIndex, crc_of, fingerprint_of, finish, is_pack, open_pack, partial_file
from halfstep.disk import take_turn
from halfstep.errors import DataError, format_bytes, format_count


class PackingBar:
    """Told how many images of how many are done; the first word of it draws the bar."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._bar = Progress(console=Console(stderr=True), transient=True)
        self._task: TaskID | None = None

    @property
    def was_shown(self) -> bool:
        """Whether anything was packed."""
        return self._task is not None

    def __enter__(self) -> PackingBar:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.was_shown:
            self._bar.stop()

    def __call__(self, done: int, total: int) -> None:
        if self._task is None:
            self._bar.start()
            self._bar.console.print(
                f"packing {format_count(total, 'image')} into {self._path}", soft_wrap=True, markup=False
            )
            self._task = self._bar.add_task("packing", total=total)
        self._bar.update(self._task, completed=done)


DEFAULT_SIZE = 256
"""Pixels a side: the 256 to which ImageNet's evaluation resizes, of which training at 224 needs most."""
Told = Callable[[int, int], None]
"""Told how many images of how many are done."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PackSettings:
    """What is stored, and within which limits."""

    size: int = DEFAULT_SIZE
    limit_gb: float = 64.0
    on_bad_file: OnBadFile = "error"
    workers: int = 0
    """Threads that decode; 0 means one a core."""


def default_pack_path(root: Path, size: int) -> Path:
    """Inside the folder, one file a size."""
    return root / f".halfstep-{size}.pack"


def packed_sizes(root: Path) -> list[int]:
    """Sizes of the packs that lie inside the folder."""
    parts = (path.name.removeprefix(".halfstep-").removesuffix(".pack") for path in root.glob(".halfstep-*.pack"))
    return sorted(int(part) for part in parts if part.isdecimal())


def open_or_pack(folder: ImageFolder, path: Path, settings: PackSettings, *, progress: Told | None = None) -> Pack:
    """The cache of a folder: the one at `path` where it is whole and fits the folder, else a new one."""
    with take_turn(path):
        if path.is_file():
            try:
                return open_pack(path, fingerprint=fingerprint(folder, settings))
            except DataError:
                pass  # stale or broken: made again, which the caller sees by its progress
        return pack(folder, path, settings, progress=progress)


def pack(folder: ImageFolder, path: Path, settings: PackSettings, *, progress: Told | None = None) -> Pack:
    """Decode the whole folder into a cache file at `path`, replacing what is there."""
    paths, labels = folder.train.paths + folder.val.paths, folder.train.labels + folder.val.labels
    check_room(path, len(paths), settings)
    mark = fingerprint(folder, settings)
    bad_files = BadFiles(settings.on_bad_file)
    rows: list[tuple[int, tuple[int, int], int]] = []
    num_train = 0
    with naming_no_room(path, "the packed images"), partial_file(path, len(paths), settings.size) as (pixels, partial):
        for done, (number, outcome) in enumerate(_decode_all(folder, settings, pixels), start=1):
            if isinstance(outcome, DataError):
                bad_files.report(outcome)
            else:
                size, row = outcome, len(rows)
                if row != number:
                    pixels[row] = pixels[number]  # closes the gap that a bad file left
                rows.append((number, size, crc_of(pixels[row])))
                num_train += number < len(folder.train)
            if progress is not None:
                progress(done, len(paths))
        index = PackIndex(
            size=settings.size,
            num_train=num_train,
            classes=folder.classes,
            titles=dict(folder.titles),
            fingerprint=mark,
            names=tuple(paths[number].relative_to(folder.root).as_posix() for number, _, _ in rows),
            labels=tuple(labels[number] for number, _, _ in rows),
            sizes=tuple(size for _, size, _ in rows),
            checksums=tuple(crc for _, _, crc in rows),
            left_out=tuple(f"{error.what}: {error.why}" for error in bad_files.skipped),
        )
        check_classes_left(index)
        bad_files.refuse_empty_validation(len(folder.val), len(rows) - num_train)
        finish(partial, path, pixels, index)
    return open_pack(path, verify_bytes=1)


def fingerprint(folder: ImageFolder, settings: PackSettings) -> str:
    """Of the folder's files and of the settings that change what is stored."""
    stored: dict[str, object] = {"size": settings.size, "on_bad_file": settings.on_bad_file, "classes": folder.classes}
    if folder.has_table:  # else the folders' names are the labels
        stored["labels"] = (folder.train.labels, folder.val.labels)
    return fingerprint_of(folder.root, (folder.train.paths, folder.val.paths), stored)


def why_stale(index: PackIndex, folder: ImageFolder, settings: PackSettings) -> str:
    """Why training on the folder would make a cache with this index again; empty where it would not."""
    if index.fingerprint == fingerprint(folder, settings):
        return ""
    now = {path.relative_to(folder.root).as_posix() for path in folder.train.paths + folder.val.paths}
    gone = len(set(index.names) - now)
    if gone or len(now) != len(index.names) + len(index.left_out):
        new = len(now - set(index.names)) - len(index.left_out)
        return f"the folder changed since it was packed ({format_count(max(new, 0), 'picture')} new, {gone:,} gone)"
    return (
        "a picture was written again or moved to another split since it was packed, or the settings are others "
        "(size, split, on-bad-file)"
    )


def check_room(path: Path, num_images: int, settings: PackSettings) -> None:
    """Refuse a cache over the limit, in a place that is taken or has no room for it, before any work."""
    needed = num_images * settings.size * settings.size * 3
    what = f"{format_count(num_images, 'image')} of {settings.size}×{settings.size} pixels"
    if needed > settings.limit_gb * 1e9:
        fits = math.isqrt(int(settings.limit_gb * 1e9 / num_images / 3))
        raise DataError(
            f"{what} would take {format_bytes(needed, digits=3)}",
            why=f"the limit is {format_bytes(settings.limit_gb * 1e9, digits=3)}",
            fix=f"raise data.cache_limit_gb (--limit-gb), or store {fits} pixels per side: data.cache_size (--size)",
        )
    if path.exists() and not is_pack(path):
        raise DataError(
            f"{path} exists and is not a packed cache",
            why="only an older cache is replaced",
            fix="delete it, or name another file: data.cache_file=FILE (--out FILE)",
        )
    refuse_no_room(path, needed, what)


def check_classes_left(index: PackIndex) -> None:
    """Refuse a cache in which bad files were all of a class."""
    seen = set(index.labels[: index.num_train])
    lost = [name for number, name in enumerate(index.classes) if number not in seen]
    if lost:
        raise DataError(f"no readable training picture in class {', '.join(lost)}", why="all of them were left out")


def whole_stretched(path: Path, size: int) -> tuple[Array, tuple[int, int]]:
    """A whole picture at (size, size), and its true size."""
    with open_picture(path) as picture:
        image = picture.rgb(reduction=min(picture.size) / size)
        square = image.resize((size, size), Image.Resampling.BILINEAR, reducing_gap=REDUCING_GAP)
        return np.asarray(square), picture.size


def centre_unstretched(path: Path, size: int) -> tuple[Array, tuple[int, int]]:
    """The centre square of a picture at (size, size), and its true size."""
    with open_picture(path) as picture:
        return centre_square(picture, size, 1.0), picture.size


def _decode_all(
    folder: ImageFolder, settings: PackSettings, pixels: Array
) -> Iterator[tuple[int, tuple[int, int] | DataError]]:
    """Fill the rows of `pixels`, in order of completion by row; a row's size or what is wrong with its file."""
    paths, num_train = folder.train.paths + folder.val.paths, len(folder.train)

    def fill(number: int) -> tuple[int, int] | DataError:
        stored = whole_stretched if number < num_train else centre_unstretched
        try:
            pixels[number], size = stored(paths[number], settings.size)
        except DataError as error:
            return error
        return size

    workers = settings.workers or os.cpu_count() or 1
    yield from enumerate(read_ahead(fill, range(len(paths)), num_threads=workers))
