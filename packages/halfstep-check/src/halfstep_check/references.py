"""Files that a config names: `deepspeed_config_file`, `deepspeed`, `--config_file`. Opened when they are there."""

from __future__ import annotations

from pathlib import Path

from halfstep_check.declarations import Reference
from halfstep_check.findings import Finding

MAX_FOLLOWED = 20
"""Files opened because another one names them; a launcher file and its DeepSpeed JSON are two."""


def file_of(reference: Reference) -> Path | None:
    """The file meant: beside the one that names it, or from the working directory, as the frameworks look."""
    beside = Path(reference.place.path).parent / reference.name
    return next((path for path in dict.fromkeys((beside, Path(reference.name))) if is_plain_file(path)), None)


def is_plain_file(path: Path) -> bool:
    """Pipes and devices would wait forever, folders are not configs."""
    try:
        return path.is_file()
    except (OSError, ValueError):  # a name too long for the file system, or with a NUL in it
        return False


def missing(reference: Reference) -> Finding:
    folder = Path(reference.place.path).parent
    looked = "in the working directory" if str(folder) == "." else f"in {folder} or the working directory"
    return Finding(
        rule="missing-file",
        message=f"{reference.spelled}: no such file {looked}, so what it says was not checked",
        place=reference.place,
        fix="correct the path, or name the file on the command line of check",
    )
