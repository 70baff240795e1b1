"""Real processes that start at once: each is forked off one that has imported torch and done nothing else."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

FORKED = multiprocessing.get_context("forkserver")
# The optimizers' first call would import the compiler, which takes longer than all the rest.
FORKED.set_forkserver_preload(["torch._dynamo", "halfstep.cli.train", "halfstep.run.train"])


@contextmanager
def process(call: Callable[..., object], *arguments: Any, output: Path) -> Iterator[ForkServerProcess]:
    """`call` in a process of its own, which writes to the end of `output` and does not outlive the block."""
    started = FORKED.Process(target=_call, args=(output, multiprocessing.get_start_method(), call, arguments))
    started.start()
    try:
        yield started
    finally:
        started.kill()
        started.join()


def nothing_waits_for_the_disk() -> None:
    """Runs flush what they write, so that a power cut costs nothing. No test cuts the power, and tests with checkpoints
    at every step would wait most of their time."""
    os.fsync = lambda handle: None


def _call(output: Path, start_method: str, call: Callable[..., object], arguments: tuple[Any, ...]) -> None:
    nothing_waits_for_the_disk()
    multiprocessing.set_start_method(start_method, force=True)  # its workers are started as anybody's are
    with output.open("ab") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    call(*arguments)
