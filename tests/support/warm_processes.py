"""Real processes that start at once: each is forked off one that has imported torch and done nothing else. That one
was started by whichever test came first, so each takes over environment and folder from the test that wants it."""

from __future__ import annotations

import multiprocessing
import multiprocessing.util
import os
import pty
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

Surroundings = tuple[dict[str, str], Path]
FORKED = multiprocessing.get_context("forkserver")
# Made now: where a test has moved temporary files to a folder of its own, a socket's path would be too long.
multiprocessing.util.get_temp_dir()
# The optimizers' first call would import the compiler, which takes longer than all the rest.
PRELOADED = ["torch._dynamo", "halfstep_train.cli.train", "halfstep_train.run.train"]
FORKED.set_forkserver_preload(PRELOADED if find_spec("halfstep_train") else PRELOADED[:1])


@contextmanager
def process(call: Callable[..., object], *arguments: Any, output: Path) -> Iterator[ForkServerProcess]:
    """`call` in a process of its own, which writes to the end of `output` and does not outlive the block."""
    method = multiprocessing.get_start_method()
    started = FORKED.Process(target=_call, args=(output, method, surroundings(), call, arguments))
    started.start()
    try:
        yield started
    finally:
        started.kill()
        started.join()


@contextmanager
def at_terminal(call: Callable[..., object], *arguments: Any) -> Iterator[tuple[ForkServerProcess, int]]:
    """`call` at a pseudo-terminal of its own, and the handle of the terminal's other end. Ctrl-C typed into it is a
    signal as at a desk, and closing it signals as well."""
    handle, its_end = pty.openpty()
    sits, seat = FORKED.Pipe(duplex=False)
    arguments = (os.ttyname(its_end), seat, surroundings(), call, arguments)
    started = FORKED.Process(target=_call_at_terminal, args=arguments)
    started.start()
    seat.close()
    sits.poll(60)
    os.close(its_end)  # not before it is open there, or the terminal would be gone
    try:
        yield started, handle
    finally:
        started.kill()
        started.join()


def _call_at_terminal(
    name: str, seat: Any, where: Surroundings, call: Callable[..., object], given: tuple[Any, ...]
) -> None:
    nothing_waits_for_the_disk()
    take_over(where)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.setsid()
    terminal = os.open(name, os.O_RDWR)  # the first one that a session opens controls it
    for stream in (0, 1, 2):
        os.dup2(terminal, stream)
    os.close(terminal)
    seat.close()
    sys.stdin = os.fdopen(0)
    call(*given)


def surroundings() -> Surroundings:
    return dict(os.environ), Path.cwd()


def take_over(where: Surroundings) -> None:
    environment, folder = where
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    tempfile.tempdir = None  # asked for again, of the environment


def nothing_waits_for_the_disk() -> None:
    """Runs flush what they write, so that a power cut costs nothing. No test cuts the power, and tests with checkpoints
    at every step would wait most of their time."""
    os.fsync = lambda handle: None


def _call(
    output: Path, start_method: str, where: Surroundings, call: Callable[..., object], arguments: tuple[Any, ...]
) -> None:
    nothing_waits_for_the_disk()
    take_over(where)
    multiprocessing.set_start_method(start_method, force=True)  # its workers are started as anybody's are
    with output.open("ab") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    call(*arguments)
