"""Files of a data set: finding, reading and dividing them, and what happens with one that cannot be read."""

from __future__ import annotations

import importlib
import os
import pickle
import random
import re
import struct
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from PIL import Image

from halfstep.disk import open_atomic_folder
from halfstep.errors import DataError, Interrupted, explain_refused_pickle, summarise_error

Array = np.ndarray[Any, Any]

IMAGE_ENDINGS = (".png", ".jpg", ".jpeg", ".tif", ".tiff", ".bmp", ".gif", ".webp", ".ppm", ".pgm")
ARRAY_ENDINGS = (".npy", ".pt", ".pth")
READABLE_ENDINGS = IMAGE_ENDINGS + ARRAY_ENDINGS
UNREADABLE = (
    OSError,
    SyntaxError,  # Pillow's word for a broken PNG chunk
    ValueError,
    EOFError,
    struct.error,
    RuntimeError,
    pickle.UnpicklingError,
    zipfile.BadZipFile,
    Image.DecompressionBombError,
)

TRAIN_NAMES, VALIDATION_NAMES = ("train", "training"), ("val", "valid", "validation", "test")
"""Names of the two splits' folders, files or shards, in the order of preference."""
OnBadFile = Literal["error", "skip"]
Item = TypeVar("Item")
Result = TypeVar("Result")


class BadFiles:
    """Collect problems with single files: raise the first one, or leave all such files out and count them."""

    def __init__(self, mode: OnBadFile) -> None:
        self.mode = mode
        self.skipped: list[DataError] = []

    def report(self, error: DataError) -> None:
        """Raise `error`, or record that its file is left out."""
        if self.mode == "error":
            raise error
        self.skipped.append(error)

    def try_each(self, work: Callable[[Item], Result], items: Sequence[Item]) -> list[tuple[Item, Result]]:
        """Run `work` on every item in threads; return the items without an error, and report the others in order."""
        done = []
        for item, outcome in zip(items, run_in_threads(work, items), strict=True):
            if isinstance(outcome, DataError):
                self.report(outcome)
            else:
                done.append((item, outcome))
        return done

    @property
    def notes(self) -> tuple[str, ...]:
        """Return notes for the user about the files left out."""
        return tuple(f"left out: {error.what}" + (f" ({error.why})" if error.why else "") for error in self.skipped)

    def refuse_empty_split(self, split: str, num_before: int, num_left: int) -> None:
        """Raise if no file of a split is left: without validation a run would have no best checkpoint."""
        if num_before and not num_left:
            raise DataError(
                f"no usable file is left for {split}: all {num_before} were left out",
                why=list_some(error.what for error in self.skipped),
                fix="repair them, or split differently (data.val_fraction=0 trains without validation)",
            )


def require_folder(folder: str | Path | None, *, or_file: bool = False) -> Path:
    """Return a data folder, or with `or_file` a file, such as `data.dir`, that must be given and exist."""
    if folder is None:
        raise DataError("no data folder", why="data.dir is not set", fix="--data-dir DIR")
    root = Path(folder)
    if not root.is_dir() and not (or_file and root.is_file()):
        kind = "is a file" if root.exists() else "does not exist"
        raise DataError(
            f"data folder {root} {kind}", fix="check --data-dir (data.dir); leave it out to train on demo data"
        )
    return root


def import_optional(package: str, needed_by: str, fix: str) -> Any:
    """Import a package that only some data need."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise DataError(f"{needed_by} needs the package {package}", why="it is not installed", fix=fix) from error


def run_in_threads(work: Callable[[Item], Result], items: Sequence[Item]) -> list[Result | DataError]:
    """Return, in order, `work` of every item or its DataError; Pillow decodes without the interpreter's lock."""
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        return list(threads.map(return_errors(work), items))


def return_errors(work: Callable[[Item], Result]) -> Callable[[Item], Result | DataError]:
    """Return `work` such that it returns its DataErrors: the first one raised would hide those of the other files."""

    def attempt(item: Item) -> Result | DataError:
        try:
            return work(item)
        except DataError as error:
            return error

    return attempt


def count_held_out(num_items: int, fraction: float) -> int:
    """Return how many items a fraction holds out for validation: at least one, and never all."""
    return min(num_items - 1, max(1, round(num_items * fraction))) if fraction > 0 else 0


def split_off(items: Sequence[Item], fraction: float, seed: int | str) -> tuple[list[Item], list[Item]]:
    """Return training and validation items: the same for the same items and seed, at least one in each if possible."""
    num = count_held_out(len(items), fraction)
    # A private generator: the split must not depend on random numbers drawn before.
    chosen = set(random.Random(seed).sample(range(len(items)), num))
    train = [item for place, item in enumerate(items) if place not in chosen]
    return train, [items[place] for place in sorted(chosen)]


def list_files(folder: Path, endings: Sequence[str], *, recursive: bool = False) -> list[Path]:
    """Return the files with one of the endings, without hidden ones, in natural order (2 before 10).

    A broken link is included: reading it raises an error that names it, while leaving it out would silently shrink the
    data set.
    """
    found = []
    for path in folder.rglob("*") if recursive else folder.iterdir():
        if path.suffix.lower() in endings and (path.is_file() or not path.exists()):
            inside = path.relative_to(folder)
            if not any(part.startswith(".") for part in inside.parts):
                found.append((make_natural_key(inside.as_posix()), path))
    return [path for _, path in sorted(found)]


def list_folders(folder: Path) -> list[Path]:
    """Return the folders inside a folder in natural order, without hidden ones and macOS's `__MACOSX`."""
    found = [path for path in folder.iterdir() if path.is_dir() and not path.name.startswith((".", "__"))]
    return sorted(found, key=lambda path: make_natural_key(path.name))


def list_images(folder: Path) -> list[Path]:
    """Return the image and array files of a folder, which must hold at least one."""
    found = list_files(require_folder(folder), READABLE_ENDINGS)
    if not found:
        why = f"it contains {describe_content(folder)}"
        raise DataError(f"no images in {folder}", why=why, fix="supported formats: " + " ".join(READABLE_ENDINGS))
    return found


def list_image_files(folder: Path) -> list[Path]:
    """Return the image files of a folder and its subfolders in natural order."""
    return list_files(folder, IMAGE_ENDINGS, recursive=True)


def describe_content(folder: Path) -> str:
    """Return a few names of what a folder holds, for an error message."""
    names = sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
    return list_some(names) or "nothing"


def make_natural_key(name: str) -> list[tuple[int, str]]:
    """Return a sort key that compares digits as numbers."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def load_array(path: Path) -> Array:
    """Return the values of an array file unchanged, without unpickling code; an error names a corrupt file."""
    writer = "np.save" if path.suffix.lower() == ".npy" else "torch.save"
    try:
        if writer == "np.save":
            # Mapped, so that asking for the shape alone reads the header alone.
            return np.load(path, mmap_mode="r", allow_pickle=False)
        tensor = torch.load(path, map_location="cpu", weights_only=True)
    except Interrupted:  # by a signal
        raise
    except OSError as error:
        raise make_unreadable_error(path, error) from error
    except Exception as error:  # a foreign file can break a reader in any way
        # Not torch's own message, which advises to switch its check off.
        why = explain_refused_pickle(error) or f"it is not a file of {writer}, or it is damaged or incomplete"
        raise DataError(
            f"cannot read {path}",
            why=why,
            fix="save only the values with np.save(FILE, array) or torch.save(tensor, FILE), or leave bad files out: "
            "data.on_bad_file=skip",
        ) from error
    if not isinstance(tensor, torch.Tensor):
        raise DataError(f"{path} contains a {type(tensor).__name__}", why="a .pt file must contain one tensor")
    return tensor.numpy()


def make_unreadable_error(path: Path, error: BaseException) -> DataError:
    """Return the error for a file that is corrupt, truncated or not of the type that its extension names."""
    why = summarise_error(error).replace(str(path), path.name)
    return DataError(
        f"cannot read {path}", why=why, fix="replace the file, or leave bad files out: data.on_bad_file=skip"
    )


def list_some(names: Iterable[object], count: int = 5) -> str:
    """Return a few names for an error message, and how many more there are."""
    listed = [str(name) for name in names]
    return ", ".join(listed[:count]) + (f" and {len(listed) - count} more" if len(listed) > count else "")


@contextmanager
def create_folder(folder: Path) -> Iterator[Path]:
    """Yield a folder to write into; it becomes `folder`, which must not exist, and vanishes on any error."""
    if folder.exists():
        raise DataError(
            f"{folder} exists already", why="demo data never overwrites anything", fix="choose another --out"
        )
    with open_atomic_folder(folder, flushes=False) as unfinished:  # thousands of files that can be made again
        yield unfinished
