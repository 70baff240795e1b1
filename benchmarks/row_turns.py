"""Rows that compile side by side, each in a process of its own, and are timed one after the other.

A row says `ready` once it is compiled, waits for its turn, and prints what it found as its last line. Kernels are
chosen in a row's first steps, so until then one process at a time has the device, and lets go of it while it compiles.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from halfstep.hardware.device_facts import Hardware
from halfstep.hardware.measure import measure
from halfstep.hardware.probe import probe
from halfstep_train.bench.problem import Problem
from speed_turns import OneAtATime

COMPILING_SHARE = 0.75
"""Of the time there is: who is not ready by then is left out, or nothing would be timed."""
READY = "ready"
TURNS = "HALFSTEP_ROW_TURNS"
"""Folder that the rows of one call share; unset where a row runs alone."""


def rows_in_turn(jobs: Sequence[Sequence[str]], *, seconds: float) -> Iterator[tuple[Sequence[str], dict[str, Any]]]:
    """Each job (a script and its words) and what it found, in order; `seconds` for all of them, 0: no limit."""
    began = time.monotonic()
    compiled_by = began + COMPILING_SHARE * seconds if seconds else float("inf")
    with tempfile.TemporaryDirectory() as folder:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        hardware = measure(probe(device)) if device == "cuda" else probe(device)
        (Path(folder) / "hardware.json").write_text(json.dumps(hardware.to_dict()))
        with contextlib.ExitStack() as stack:
            rows = [stack.enter_context(_RowProcess(words, folder)) for words in jobs]
            for row in rows:
                row.wait_until_ready(compiled_by)
                print(f"{time.monotonic() - began:4.0f} s {' '.join(row.words[1:])}: {row.state}", flush=True)
            for row in rows:
                left = max(0.0, began + seconds - time.monotonic()) if seconds else None
                yield row.words, row.found(left)


class _RowProcess:
    """A row's process, as its parent sees it."""

    def __init__(self, words: Sequence[str], folder: str) -> None:
        self.words, self.state = words, ""
        self._lines: list[str] = []
        self.process = subprocess.Popen(
            [sys.executable, *words],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | {TURNS: folder},
        )  # fmt: skip

    def __enter__(self) -> _RowProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()

    def wait_until_ready(self, until: float) -> None:
        assert self.process.stdout is not None
        with selectors.DefaultSelector() as heard:
            heard.register(self.process.stdout, selectors.EVENT_READ)
            while not self.state:
                if not heard.select(None if until == float("inf") else max(0.0, until - time.monotonic())):
                    self.state = "not compiled in time"
                    self.process.kill()
                elif not (line := self.process.stdout.readline()):
                    self.state = f"ended with {self.process.wait()}"
                elif line.strip() == READY:
                    self.state = READY
                else:
                    self._lines.append(line)

    def found(self, seconds: float | None) -> dict[str, Any]:
        if self.state == READY:
            try:
                said, _ = self.process.communicate("go\n", timeout=seconds)
                self._lines += said.splitlines()
            except subprocess.TimeoutExpired:
                return {"problem": "no time was left to finish it"}
        try:
            result: dict[str, Any] = json.loads(self._lines[-1])
        except (IndexError, ValueError):
            return {"problem": self.state if self.state != READY else f"ended with {self.process.returncode}"}
        return result


class Turn:
    """In a row's process: the device while kernels are chosen, and the wait for the turn to be timed."""

    def __init__(self) -> None:
        folder = os.environ.get(TURNS)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._lock = OneAtATime((Path(folder) / "device").open("a"), device) if folder else None
        stored = Path(folder) / "hardware.json" if folder else None
        self._stored = json.loads(stored.read_text()) if stored is not None else None

    def hardware(self, device: str) -> Hardware:
        """As the parent measured it alone."""
        if self._stored is not None:
            return Hardware.from_dict(self._stored)
        return measure(probe(device)) if device == "cuda" else probe(device)

    def lent_to(self, problem: Problem) -> Problem:
        """The same problem, whose runner has the device from its model on, but while it compiles."""
        if self._lock is None:
            return problem
        lock, lent = self._lock, self._lock.lent_to(problem)

        def make_model() -> nn.Module:
            lock.take()
            return lent.make_model()

        return replace(lent, make_model=make_model)

    def begin(self) -> None:
        """Of a loop that is not a runner of halfstep's."""
        if self._lock is not None:
            self._lock.lend_while_compiling()

    def leave(self) -> None:
        """Let the others choose their kernels."""
        if self._lock is not None:
            self._lock.leave()

    def __call__(self) -> None:
        if self._lock is not None:
            self.leave()
            print(READY, flush=True)
            sys.stdin.readline()
