"""What a model made in mid-training: pictures and texts by name, one folder per step, there whole or not at all."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from halfstep.disk import whole_folder
from halfstep.errors import CheckpointError, ConfigError

FORM = "a str, or a uint8 array of shape (height, width) or (height, width, 3)"


def write_samples(folder: Path, found: Mapping[str, Any]) -> list[Path]:
    """`NAME.png` and `NAME.txt`; those of the same step, from before a resumed run was killed, are replaced."""
    for name, value in found.items():
        _refuse_other(name, value)
    try:
        with whole_folder(folder, replaces=True) as hidden:
            written = [_write(hidden / name, value) for name, value in found.items()]
    except OSError as error:
        raise CheckpointError(f"cannot write samples into {folder}: {error.strerror}", fix="make room") from error
    return [folder / path.name for path in written]


def _write(path: Path, value: Any) -> Path:
    if isinstance(value, str):
        path = path.with_name(f"{path.name}.txt")
        path.write_text(value, encoding="utf-8")
    else:
        path = path.with_name(f"{path.name}.png")
        Image.fromarray(value).save(path)
    return path


def _refuse_other(name: str, value: Any) -> None:
    if not name or Path(name).name != name or name.startswith("."):
        raise ConfigError(f"sample() names a sample {name!r}", why="it becomes a file's name", fix="a plain name")
    is_picture = isinstance(value, np.ndarray) and value.dtype == np.uint8 and value.size > 0
    if isinstance(value, str) or is_picture and (value.ndim == 2 or value.ndim == 3 and value.shape[2] == 3):
        return
    shape = f" of {value.dtype}, shape {tuple(value.shape)}" if hasattr(value, "dtype") else ""
    raise ConfigError(f"sample() gives {name!r} as a {type(value).__name__}{shape}", fix=f"give {FORM}")
