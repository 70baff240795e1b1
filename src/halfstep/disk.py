"""Small files that are there whole or not at all, whatever happens to the process or the disk."""

from __future__ import annotations

import os
from pathlib import Path

from halfstep.errors import CheckpointError


def write_whole(path: Path, text: str) -> None:
    """Write beside it, flush, rename; when that fails, what was there before is still there."""
    path = Path(os.path.realpath(path))  # a link stays, and what it names is written
    hidden = path.with_name(f".{path.name}-{os.getpid()}")
    try:
        hidden.write_text(text, encoding="utf-8")
        flush(hidden)
        hidden.replace(path)
        flush(path.parent)
    except OSError as error:
        hidden.unlink(missing_ok=True)
        raise CheckpointError(
            f"cannot write {path}: {error.strerror}",
            why="nothing was overwritten",
            fix="free some space or fix the folder's permissions, then run the same command again",
        ) from error


def flush(path: Path) -> None:
    """Wait until a file, or a folder's list of names, is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
