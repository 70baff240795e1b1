"""A folder that exists when it is complete, and not before."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from halfstep.errors import DataError


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """A folder to write into, which becomes `folder` at the end and vanishes on any error."""
    if folder.exists():
        raise DataError(f"{folder} exists already", why="demo data never overwrite anything", fix="another --out")
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        yield unfinished
        unfinished.chmod(0o755)  # mkdtemp makes it private
        os.rename(unfinished, folder)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
