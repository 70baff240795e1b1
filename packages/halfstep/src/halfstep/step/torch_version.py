"""The newest version of torch that halfstep was tested with, and one line for users of a newer one."""

from __future__ import annotations

import functools
import sys

NEWEST_TESTED = (2, 15)
"""`make torch TORCH=2.15.0` runs the tests; benchmarks/results/torch_versions.json has the results."""


@functools.cache
def report_untested_torch(version: str) -> None:
    """Print one line, once per process, if this version of torch is newer than the newest tested one."""
    major, minor = version.split(".")[:2]
    if (int(major), int(minor)) > NEWEST_TESTED:
        tested = ".".join(map(str, NEWEST_TESTED))
        print(
            f"halfstep: torch {version} is newer than {tested}, the newest version that halfstep was tested with",
            file=sys.stderr,
            flush=True,
        )
