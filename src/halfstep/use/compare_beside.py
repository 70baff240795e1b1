"""Runs of a comparison in processes of their own: stopped, they save and leave, and none outlives it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from halfstep.errors import Interrupted
from halfstep.use.compare_run import Outcome, Row

Job = tuple[Row, int, Path]
Run = Callable[[Row, int, Path], Outcome]


def beside_each_other(run: Run, jobs: Sequence[Job], at_once: int) -> Iterator[Outcome]:
    """In the order of the jobs."""
    # Not forked: a process that has used the GPU cannot hand it down.
    pool = ProcessPoolExecutor(
        at_once, mp_context=multiprocessing.get_context("spawn"), initializer=_leave_with_the_comparison
    )
    try:
        with _ctrl_c_is_ours():
            outcomes = pool.map(partial(_one, run), jobs)
        yield from outcomes
    except BrokenProcessPool as error:
        raise Interrupted("a process with a run was ended from outside: by a signal, or for want of memory") from error
    finally:
        for process in multiprocessing.active_children():
            process.terminate()
        pool.shutdown(cancel_futures=True)


_busy, _leaving = threading.Lock(), threading.Event()
"""Of a process with runs: whether it makes one now, and whether it was asked to make no more."""


def _one(run: Run, job: Job) -> Outcome:
    with _busy:
        if _leaving.is_set():
            raise Interrupted("asked to leave")
        try:
            return run(*job)
        except Interrupted:
            _leaving.set()
            raise


@contextmanager
def _ctrl_c_is_ours() -> Iterator[None]:
    """A terminal sends it to all processes; those started here leave it to us, who ask them to save and leave."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    usual = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)


def _leave_with_the_comparison() -> None:
    """Where it was killed nobody reads the outcome, and the run must be free when the comparison goes on."""
    comparison = multiprocessing.parent_process()

    def wait() -> None:
        assert comparison is not None
        comparison.join()
        os.kill(os.getpid(), signal.SIGTERM)
        with _busy:  # until it is saved
            os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
