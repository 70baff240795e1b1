"""Read and write `metrics.jsonl`: one JSON record per line, readable even if a run was killed in the middle of a line.

JSON has no NaN: non-finite values are stored as the strings "NaN", "Infinity" or "-Infinity", which `read` converts
back. Finite floats are written with `repr`, so they are restored bit-exactly.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from io import FileIO
from pathlib import Path
from typing import Any

from halfstep.disk import parse_json, refuse_special_file, write_atomically
from halfstep.errors import CheckpointError, suggest_command

NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class MetricsFile:
    """Appends records unbuffered: each is handed to the OS when `append` returns."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: FileIO | None = None

    def append(self, record: Mapping[str, object]) -> None:
        """Write one record to the end of the file."""
        line = encode(record)
        try:
            # Opened late: `cut_back` replaces the file, and an older handle would write into the deleted one.
            # Unbuffered: a write that failed on a full disk must not be repeated when the file is closed.
            self._file = self._file or self.path.open("ab", buffering=0)
            while line:
                line = line[self._file.write(line) :]
        except OSError as error:
            again = suggest_command("train", "--resume", self.path.parent)
            raise CheckpointError(
                f"cannot write {self.path}: {error.strerror}",
                why="a run does not continue without its records",
                fix=f"free disk space or make it writable, then continue with: {again}",
            ) from error

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def encode(record: Mapping[str, object]) -> bytes:
    """Return the record's line in the file."""
    return json.dumps(replace_non_finite(record), allow_nan=False).encode() + b"\n"


def read(path: Path) -> list[dict[str, Any]]:
    """Return all complete records, oldest first; empty if there is no file yet."""
    return [
        {name: NOT_FINITE.get(value, value) if isinstance(value, str) else value for name, value in record.items()}
        for _, record in _iterate_records(path)
    ]


def find_last_step(path: Path) -> int | None:
    """Return the newest recorded step; None if there is none."""
    return max((record["step"] for _, record in _iterate_records(path) if "step" in record), default=None)


def cut_back(path: Path, num_records: int) -> int:
    """Keep the records that existed at a checkpoint, by count: one step may write before and after it. Return how many
    there are, which are fewer if some were lost."""
    if not path.exists() and not path.is_symlink():  # writing would create the target of a dangling link
        return 0
    kept = [line for line, _ in _iterate_records(path)][:num_records]
    write_atomically(path, "".join(f"{line.decode()}\n" for line in kept))
    return len(kept)


def _iterate_records(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Yield each line with its record; skip an incomplete last line, which a killed run may leave."""
    refuse_special_file(path)
    lines = path.read_bytes().split(b"\n") if path.exists() else []
    for number, line in enumerate(lines, start=1):
        try:
            if line:
                record = parse_json(line)
                if not isinstance(record, dict):
                    raise ValueError("not an object")
                yield line, record
        except ValueError as error:  # not JSON, not UTF-8, or not a record
            if number == len(lines):
                return
            raise CheckpointError(
                f"line {number} of {path} is not a record: {line[:60]!r}",
                why="the file was edited or damaged: a killed run can leave only its last line incomplete",
                fix="delete that line",
            ) from error


def replace_non_finite(value: object) -> object:
    """Replace non-finite floats by strings, also in nested values."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {name: replace_non_finite(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [replace_non_finite(inner) for inner in value]
    return value
