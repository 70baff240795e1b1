"""Sizes and times of a run's data files when it started: a mask that was painted over since is noticed on resume.

Content is not read: for a data set of any size this is one look at each file's entry. What it finds is said, never
refused, since a copy of the data on another machine has other times and the same content.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

from halfstep.data.files import some_of
from halfstep.data.loader import FileSamples
from halfstep.disk import write_whole
from halfstep.errors import counted
from halfstep.run.folder import RunFolder
from halfstep.workloads.workload import Workload

SHOWN = 3


def record_data(workload: Workload, folder: RunFolder) -> None:
    """Remember the files; samples that are none leave nothing to remember."""
    files = list(_files(workload))
    if files:
        write_whole(_place(folder), json.dumps({"files": len(files), "digest": _digest(files)}))


def changed_data(workload: Workload, folder: RunFolder) -> list[str]:
    """A note where sizes or times are others than when the run started; none for runs without a record."""
    try:
        record = json.loads(_place(folder).read_text())
        then, num_then = record["digest"], record["files"]
        started_s = _place(folder).stat().st_mtime
    except (OSError, ValueError, KeyError):
        return []
    files = list(_files(workload))
    if _digest(files) == then:
        return []
    if len(files) != num_then:
        return [
            f"the run started with {counted(num_then, 'data file')}, there are {len(files)} now: "
            "it does not continue exactly"
        ]
    newer = [path for path in files if path.stat().st_mtime > started_s]
    which = f"written since: {some_of(newer, SHOWN)}" if newer else "none was written since, so they may be copies"
    return [f"data files have other sizes or times than when this run started ({which}): it may not continue exactly"]


def _files(workload: Workload) -> Iterator[Path]:
    for samples in (workload.train_samples, workload.val_samples):
        if isinstance(samples, FileSamples):
            yield from samples.files()


def _digest(files: list[Path]) -> str:
    digest = hashlib.sha256()
    for path in files:
        entry = path.stat()
        # The folder's own name, not its whole path: a data set that was moved is the same one.
        digest.update(repr((path.parent.name, path.name, entry.st_size, entry.st_mtime_ns)).encode())
    return digest.hexdigest()


def _place(folder: RunFolder) -> Path:
    return folder.path / "data.json"
