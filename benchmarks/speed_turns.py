"""Rows that compile side by side and are timed alone: speed.py's `--at-once`.

Each row has a process of its own. All build, compile and make their first steps at the same time, then wait; once
nobody compiles any more they are timed one after the other, on a quiet device beside quiet cores. Kernels are chosen in
the first steps, so until then one process at a time has the device, and lets go of it while it compiles.
halfstep's `auto` decides by its own trials: it fills its cache beside the others and does all the rest in its turn.
"""

from __future__ import annotations

import contextlib
import fcntl
import multiprocessing
import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import nn
from torch._dynamo.callback import CompilationCallbackHandler, callback_handler, on_compile_end, on_compile_start
from torch._inductor import config as inductor_config

from halfstep.hardware.clock import wait_for
from halfstep.hardware.device_facts import Hardware
from halfstep_train.bench.bench import BenchRequest, list_runners, measure_runner
from halfstep_train.bench.measure_row import Pause, Row, Schedule, make_unmeasured_row
from halfstep_train.bench.problem import BenchMode, Problem
from speed_cases import Case, problem_of, row_requests
from speed_processes import make_sendable, own_decisions

COMPILING_SHARE = 0.6
"""Of the time there is: who is not compiled by then is left out, or nothing would be timed."""
FILLING = Schedule(warm_up=3, ramp=0, window=1)
READY = "ready"
PROCESSES: BaseContext = multiprocessing.get_context("spawn")


def rows_in_turn(
    cases: dict[str, Case], modes: tuple[Any, ...], hardware: Hardware, *, at_once: int, deadline: float | None
) -> Iterator[tuple[str, Row]]:
    """Each case's rows in order, so many compiled at once; those there was no time for say so."""
    jobs = [(name, case, request) for name, case in cases.items() for request in row_requests(case, modes).values()]
    its_cores = max(1, (os.cpu_count() or 1) // at_once)
    for first in range(0, len(jobs), at_once):
        with seated(jobs[first : first + at_once], hardware, its_cores) as seats:
            compiling_s = COMPILING_SHARE * (deadline - time.monotonic()) if deadline else float("inf")
            began = time.monotonic()
            for seat in seats:
                seat.wait_until_ready(began + compiling_s)
            print(f"{time.strftime('%X')} compiled {len(seats)} rows in {time.monotonic() - began:.0f} s", flush=True)
            for seat in seats:
                row = seat.timed(deadline)
                print(f"{time.strftime('%X')} {seat.case} {row.label}: {row.reason or f'{row.ms:.2f} ms'}", flush=True)
                yield seat.case, row


@dataclass(kw_only=True, slots=True)
class Seat:
    """A row's process, as its parent sees it."""

    case: str
    request: BenchRequest
    precision: str
    process: BaseProcess
    line: Connection
    row: Row | None = None
    """What it ended with, before its turn or in it."""

    def wait_until_ready(self, until: float) -> None:
        if not self._heard(until):
            self._leave_out("it was not compiled in time")

    def timed(self, deadline: float | None) -> Row:
        if self.row is None:
            self.line.send(READY)
            if not self._heard(deadline or float("inf")):
                self._leave_out("no time was left to finish it")
        assert self.row is not None
        self.process.join()
        return self.row

    def _heard(self, until: float) -> bool:
        """Whether it spoke in time: that it is ready, or its row; one that died is a row too."""
        try:
            left_s = None if until == float("inf") else max(0.0, until - time.monotonic())
            if not self.line.poll(left_s):
                return False
            said = self.line.recv()
            self.row = said if isinstance(said, Row) else None
        except EOFError:
            self.process.join()
            self._leave_out(f"its process died with {self.process.exitcode}")
        return True

    def _leave_out(self, reason: str) -> None:
        self.process.kill()  # the device must be quiet for the others
        name, _, variant = (self.request.against or (f"halfstep:{self.request.modes[0]}",))[0].partition(":")
        self.row = make_unmeasured_row(name, variant, self.precision, reason)


@contextlib.contextmanager
def seated(jobs: list[tuple[str, Case, BenchRequest]], hardware: Hardware, its_cores: int) -> Iterator[list[Seat]]:
    """A process for each job; none outlives the block."""
    seats = list[Seat]()
    with tempfile.TemporaryDirectory() as folder:
        try:
            for name, case, request in jobs:
                ours, its = PROCESSES.Pipe()
                given = (case, request, make_sendable(hardware), its, f"{folder}/device", its_cores)
                process = PROCESSES.Process(target=sit, args=given)
                process.start()
                its.close()  # so that its death is heard
                seats.append(Seat(case=name, request=request, precision=case.precision, process=process, line=ours))
            yield seats
        finally:
            for seat in seats:
                seat.process.kill()


def sit(case: Case, request: BenchRequest, hardware: Hardware, line: Connection, lock: str, its_cores: int) -> None:
    """In a process of its own: compile on so many cores, wait for the turn, be timed, and send the row."""

    def turn() -> None:
        device.leave()
        line.send(READY)
        line.recv()

    with own_decisions(), Path(lock).open("a") as file:
        device = OneAtATime(file, torch.device(hardware.device))
        beside_others: Any = inductor_config.patch(compile_threads=its_cores)
        if request.modes == ("auto",):
            with beside_others:
                fill_for_auto(case, request, hardware, device)
            turn()
            line.send(row_of(problem_of(case, hardware), request, hardware))
        else:
            with beside_others:
                row = row_of(device.lent_to(problem_of(case, hardware)), request, hardware, turn)
            line.send(replace(row, start_s=None, cache=""))  # a start beside others is nobody's start


def fill_for_auto(case: Case, request: BenchRequest, hardware: Hardware, device: OneAtATime) -> None:
    """Compile what `auto` will try; how much memory may be saved is tried in its turn."""
    words = tuple(word for word in case.words if not word.startswith("train.memory="))
    mode: BenchMode = "graph" if device.device.type == "cuda" else "compile"
    problem = device.lent_to(problem_of(replace(case, words=words), hardware))
    row_of(problem, replace(request, modes=(mode,), schedule=FILLING), hardware)  # what goes wrong, its turn will tell


def row_of(problem: Problem, request: BenchRequest, hardware: Hardware, pause: Pause | None = None) -> Row:
    [runner] = list_runners(problem, request, hardware)
    return runner if isinstance(runner, Row) else measure_runner(runner, problem, request, pause)


class OneAtATime:
    """The device, which a process has until it compiles, and takes again when it has compiled."""

    def __init__(self, file: TextIO, device: torch.device) -> None:
        self.file, self.device = file, device  # a file's lock goes with the process, however that ends
        self._is_compiling = False  # torch.compile is at work, with kernels of its own among the rest

    def lent_to(self, problem: Problem) -> Problem:
        """The same problem, whose runner keeps to this."""

        def make_model() -> nn.Module:
            self.lend_while_compiling()
            return problem.make_model()

        return replace(problem, make_model=make_model)

    def lend_while_compiling(self) -> None:
        """From now on, whether torch.compile is at work or Triton with a kernel written by hand."""

        def listen() -> None:
            CompilationCallbackHandler.clear(callback_handler)
            on_compile_start(lambda _: self._compiles(True))
            on_compile_end(lambda _: self._compiles(False))

        callback_handler.clear = listen  # type: ignore[method-assign]  # torch.compiler.reset, which each trial calls
        listen()
        if self.device.type == "cuda":
            from triton import knobs

            knobs.runtime.jit_cache_hook = lambda **_: self.lend(True)
            knobs.runtime.jit_post_compile_hook = lambda **_: self.lend(False)

    def _compiles(self, begins: bool) -> None:
        self._is_compiling = False
        self.lend(begins)
        self._is_compiling = begins

    def lend(self, lent: bool) -> None:
        """Leave it, or take it again; what happens inside torch.compile, which has left it, changes nothing."""
        is_capturing = self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if self._is_compiling or is_capturing:  # a capture does not survive waiting for the device
            return
        if lent:
            self.leave()
        else:
            self.take()

    def take(self) -> None:
        fcntl.flock(self.file, fcntl.LOCK_EX)

    def leave(self) -> None:
        """With what was handed to the device done, and its memory given back."""
        wait_for(self.device)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        fcntl.flock(self.file, fcntl.LOCK_UN)
