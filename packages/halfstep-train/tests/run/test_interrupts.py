"""Signals: saved by the first one, obeyed at once by a second Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

import tiny_workload
from halfstep.errors import Interrupted
from halfstep_train.cli.main import main
from halfstep_train.run import train as training
from halfstep_train.run.checkpoint import Checkpoints
from halfstep_train.run.interrupts import FINISHING_STEP, catch_interrupts
from warm_processes import at_terminal, process
from whole_runs import TINY, newest, resume, run


def endless(out: str, slow_from: int) -> None:
    """From this epoch on a sample takes a minute, as for a user who waits for the step to finish."""
    fetch = tiny_workload.Samples.sample

    def slow(self: Any, index: int, *, key: tuple[int, int, int]) -> dict[str, Tensor]:
        if key[1] >= slow_from:
            print(SLOW, flush=True)
            time.sleep(60)
        return fetch(self, index, key=key)

    tiny_workload.Samples.sample = slow  # type: ignore[method-assign]
    settings = [f"{key}={json.dumps(value)}" for key, value in {**TINY, "train.epochs": 100_000}.items()]
    main(["train", "tiny_workload:build", *settings, "--out", out])


SLOW = "a slow sample\n"


def stopped_twice(out: Path, *, slow_from: int) -> tuple[int | None, str, float]:
    """Exit code, what was said, and the seconds from the second Ctrl-C to the end."""
    said = out.with_name("said")
    with process(endless, str(out), slow_from, output=said) as stopped:
        assert stopped.pid is not None
        for words in (SLOW, FINISHING_STEP):
            until = time.monotonic() + 60
            while words not in (said.read_text() if said.exists() else ""):
                assert stopped.is_alive(), said.read_text()
                assert time.monotonic() < until, said.read_text()
                time.sleep(0.01)
            sent = time.monotonic()
            os.kill(stopped.pid, signal.SIGINT)
        stopped.join(timeout=30)
        return stopped.exitcode, said.read_text().replace(SLOW, "").strip("\n"), time.monotonic() - sent


def test_a_second_ctrl_c_ends_at_once_and_names_the_checkpoint_that_is_left(tmp_path: Path) -> None:
    code, said, took_s = stopped_twice(tmp_path / "run", slow_from=2)
    assert code == 130
    assert took_s < 20
    assert said.startswith(FINISHING_STEP + "\n")
    assert "Traceback" not in said
    left = Checkpoints(tmp_path / "run" / "checkpoints").list_all()[-1]
    assert left.name == "step-00000012"
    assert f"the newest checkpoint is {left}" in said
    assert f"halfstep train --resume {tmp_path / 'run'}" in said
    newest(tmp_path / "run")


def test_a_second_ctrl_c_before_the_first_checkpoint_leaves_no_folder_that_cannot_be_resumed(
    tmp_path: Path,
) -> None:
    code, said, _ = stopped_twice(tmp_path / "run", slow_from=0)
    assert code == 130
    assert "no checkpoint yet" in said
    assert "--resume" not in said
    assert not (tmp_path / "run").exists()


def test_ctrl_c_is_answered_at_once_on_standard_error(capfd: pytest.CaptureFixture[str]) -> None:
    with catch_interrupts() as asked:
        signal.raise_signal(signal.SIGINT)
        said, deadline = "", time.monotonic() + 20
        while not said and time.monotonic() < deadline:
            said = capfd.readouterr().err
        assert said == FINISHING_STEP + "\n"
        assert asked.exit_code == 130
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_a_forked_childs_ctrl_c_does_not_count_as_the_runs_second() -> None:
    with catch_interrupts() as asked:
        child = os.fork()
        if child == 0:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.1)
            os._exit(0)
        os.waitpid(child, 0)
        assert not asked
        time.sleep(0.1)


def test_a_terminal_that_is_closed_ends_the_run_saved(tmp_path: Path) -> None:
    """It takes standard output and error away as well: nothing can be printed any more."""
    with at_terminal(endless, str(tmp_path / "run"), 10**9) as (left, terminal):
        deadline = time.monotonic() + 60
        while not Checkpoints(tmp_path / "run" / "checkpoints").list_all() and time.monotonic() < deadline:
            time.sleep(0.05)
        os.close(terminal)
        left.join(timeout=60)
        assert left.exitcode == 129
    newest(tmp_path / "run")


def test_nohup_keeps_its_word() -> None:
    former = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with catch_interrupts() as asked:
            signal.raise_signal(signal.SIGHUP)
            assert not asked
    finally:
        signal.signal(signal.SIGHUP, former)


@pytest.mark.parametrize(
    ("number", "error"),
    [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, Interrupted), (signal.SIGHUP, Interrupted)],
)
@pytest.mark.parametrize("during", ["tune_plan", "record_data"])
def test_a_signal_before_training_begins_leaves_nothing_behind(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: signal.Signals,
    error: type[BaseException],
    during: str,
) -> None:
    before = signal.getsignal(number)
    monkeypatch.setattr(training, during, lambda *arguments, **more: signal.raise_signal(number))
    with pytest.raises(error) as ended:
        run(tmp_path / "run", {})
    assert getattr(ended.value, "exit_code", 130) == 128 + number
    assert signal.getsignal(number) is before
    assert list(tmp_path.iterdir()) == []


def test_a_scheduler_that_ends_a_run_before_it_goes_on_finds_it_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be in the middle of a file that was gone, such as latents."""
    run(tmp_path / "run", {"train.max_steps": 1})
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    former = signal.signal(signal.SIGTERM, lambda *_: pytest.fail("nobody listened"))
    monkeypatch.setattr(training, "build_workload", lambda *_: signal.raise_signal(signal.SIGTERM))
    try:
        with pytest.raises(Interrupted, match="SIGTERM before training began"):
            resume(tmp_path / "run", "train.max_steps=2")
    finally:
        signal.signal(signal.SIGTERM, former)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
