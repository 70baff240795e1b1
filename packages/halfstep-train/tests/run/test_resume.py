"""N + N steps equal 2N as bits: after a signal, after kills at any moment, in every precision, with any workers."""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from halfstep.errors import CheckpointError, Interrupted
from halfstep_train.cli.main import main
from halfstep_train.run import loop
from halfstep_train.run.checkpoint import Checkpoints
from halfstep_train.run.train import train
from halfstep_train.workloads import load
from tiny_training import assert_same_bits
from warm_processes import process
from whole_runs import assert_same_run, final_state, newest, records, resume

SLOW = pytest.mark.slow
"""For cases of a test whose other cases run in `make test`."""

POISONED = [2, 3, 9]
"""Before the interruption at step 6 and after it."""


def config(precision: str = "fp32", workers: int = 0, more: dict[str, Any] | None = None, **options: Any) -> list[str]:
    """Shuffling, augmentation, accumulation 3, average, clipping, skipped steps, checkpoints in mid-epoch."""
    values = {
        "precision.default": precision, "precision.simulate": precision != "fp32", "data.dir": "anywhere",
        "data.num_workers": workers, "train.batch_size": 3, "train.accumulate": 3, "train.epochs": 4,
        "train.checkpoint_every": 2, "train.report_every": 1, "ema.enabled": True, "scaler.init_scale": 2.0**24,
        "scaler.growth_interval": 3, "log.quiet": True, "device": "cpu",
        "model.options.poisoned": POISONED, **{f"model.options.{name}": value for name, value in options.items()},
        **(more or {}),
    }  # fmt: skip
    return [f"{key}={json.dumps(value)}" for key, value in values.items()]


def run(out: Path, overrides: list[str]) -> Path:
    return train(load("tiny_workload:build", overrides=overrides), out=out)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Nobody may write into it."""
    return run(tmp_path_factory.mktemp("unbroken") / "run", config())


@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=SLOW), "fp16"])
def test_a_run_stopped_in_mid_epoch_and_resumed_equals_an_unbroken_one(tmp_path: Path, precision: str) -> None:
    flag = tmp_path / "signal"
    options = {"signal_file": str(flag), "signal_step": 6, "workers": 2}
    whole = run(tmp_path / "whole", config(precision, **options))
    flag.touch()
    with pytest.raises(Interrupted) as stopped:
        run(tmp_path / "parts", config(precision, **options))
    assert stopped.value.exit_code == 143
    assert "--resume" in stopped.value.fix
    resume(tmp_path / "parts")
    assert_same_run(whole, tmp_path / "parts")
    skipped = [r["bad_step"] for r in records(whole) if r.get("event") in ("skipped", "overflow")]
    assert set(POISONED) <= set(skipped)


def test_a_run_stopped_while_it_validates_validates_again_and_equals_an_unbroken_one(
    unbroken: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, calls = loop.validate, itertools.count()

    def asked_to_end(*arguments: Any, **named: Any) -> dict[str, float]:
        if next(calls) == 1:
            signal.raise_signal(signal.SIGTERM)
        return original(*arguments, **named)

    monkeypatch.setattr(loop, "validate", asked_to_end)
    with pytest.raises(Interrupted):
        run(tmp_path / "parts", config())
    resume(tmp_path / "parts")
    assert_same_run(unbroken, tmp_path / "parts")


def test_the_number_of_workers_changes_nothing(unbroken: Path, tmp_path: Path) -> None:
    with_two = run(tmp_path / "with", config(workers=2))
    (tensors, _), (other, _) = final_state(unbroken), final_state(with_two)
    assert_same_bits(tensors, other)
    assert records(unbroken) == records(with_two)


@pytest.mark.slow
def test_kills_at_any_moment_change_nothing(tmp_path: Path) -> None:
    """SIGKILL again and again, also inside checkpoint writes (they come after every step here), two workers."""
    overrides = config(workers=2, more={"train.checkpoint_every": 1, "train.epochs": 8})
    whole = tmp_path / "whole"
    said = tmp_path / "said"
    # In a process of its own, too: a native bf16 matmul in another test turns oneDNN off for this one.
    first = ("train", "tiny_workload:build", *overrides, "--out")
    with process(main, [*first, str(whole)], output=said) as uncut:
        uncut.join(timeout=120)
        assert uncut.exitcode == 0, said.read_text()
    broken, chance = tmp_path / "broken", random.Random(0)
    checkpoints, arguments = Checkpoints(broken / "checkpoints"), [*first, str(broken)]
    for _ in range(5):
        reached = checkpoints.list_all()[-1:]
        with process(main, arguments, output=said) as killed:
            deadline = time.monotonic() + 60
            while killed.is_alive() and time.monotonic() < deadline:
                present = checkpoints.list_all()[-1:]
                if present and present != reached:
                    break
                time.sleep(0.005)
            time.sleep(chance.random() * 0.15)
        if not checkpoints.list_all():
            pytest.fail("the run never wrote a checkpoint")
        arguments = ["train", "--resume", str(broken)]
    with process(main, arguments, output=said) as last:
        last.join(timeout=120)
        assert last.exitcode == 0, said.read_text()
    assert_same_run(whole, broken)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_end_a_real_process_with_a_saved_run_and_the_words_to_resume(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    out, output = tmp_path / "run", tmp_path / "said"
    overrides = config(workers=2, more={"train.epochs": 100000})
    with process(main, ["train", "tiny_workload:build", *overrides, "--out", str(out)], output=output) as signalled:
        deadline = time.monotonic() + 60
        while not Checkpoints(out / "checkpoints").list_all() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert signalled.pid is not None
        os.kill(signalled.pid, number)
        signalled.join(timeout=60)
        assert signalled.exitcode == code
    said = output.read_text()
    assert f"halfstep train --resume {out}" in said.replace("\n", " ")
    assert "Traceback" not in said
    newest(out)


def test_another_number_of_threads_is_set_back_to_the_runs_own(tmp_path: Path) -> None:
    """Sums over a batch are split by threads, so their last bit depends on how many there are."""
    flag, threads = tmp_path / "signal", torch.get_num_threads()
    options = {"signal_file": str(flag), "signal_step": 6}
    whole = run(tmp_path / "whole", config(**options))
    flag.touch()
    with pytest.raises(Interrupted):
        run(tmp_path / "parts", config(**options))
    torch.set_num_threads(threads + 1)
    try:
        resume(tmp_path / "parts")
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(threads)
    assert_same_run(whole, tmp_path / "parts")


def test_a_truncated_checkpoint_falls_back_to_the_one_before(unbroken: Path, tmp_path: Path) -> None:
    broken = Path(shutil.copytree(unbroken, tmp_path / "broken"))
    newest = Checkpoints(broken / "checkpoints").list_all()[-1] / "model.safetensors"
    newest.write_bytes(newest.read_bytes()[:-7])
    resume(broken)
    assert_same_run(unbroken, broken)


def test_free_settings_may_change(tmp_path: Path) -> None:
    out = run(tmp_path / "run", config(more={"train.epochs": 1}))
    before = summary(out)
    resume(out, "train.epochs=2", "data.num_workers=1", "train.early_stopping_patience=3")
    assert max(r["epoch"] for r in records(out) if "epoch" in r) == 2
    after = summary(out)
    assert (before["samples"], after["samples"], after["epochs"]) == (22, 44, 2.0)
    assert all(after[name] > before[name] > 0 for name in ("elapsed_s", "trained_s", "start_s")), "of the whole run"


def summary(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "report" / "summary.json").read_text())


def test_changed_data_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import tiny_workload

    out = run(tmp_path / "run", config(more={"train.epochs": 1}))
    monkeypatch.setattr(tiny_workload.Samples, "__len__", lambda self: self.count - 1)
    with pytest.raises(CheckpointError, match="22 training and 9 validation samples became 21 and 8"):
        resume(out, "train.epochs=2")


def test_a_reader_that_leaves_does_not_end_the_run(tmp_path: Path) -> None:
    overrides, pipe = config(more={"log.quiet": False, "train.epochs": 3}), tmp_path / "pipe"
    os.mkfifo(pipe)
    with process(
        main, ["train", "tiny_workload:build", *overrides, "--out", str(tmp_path / "run")], output=pipe
    ) as left:
        with pipe.open() as reader:
            reader.readline()
        left.join(timeout=90)
        assert left.exitcode == 0
    assert max(r["epoch"] for r in records(tmp_path / "run") if "epoch" in r) == 3


EVERY_3 = {"train.checkpoint_every": 3, "train.validate_every_steps": 3}
PLATEAU = {"schedule.name": "plateau", "schedule.patience": 1, "schedule.warmup_epochs": 0, "optimizer.lr": 1e-4}


def in_a_process(said: Path, call: Callable[..., object], *arguments: Any, ends: int = 0) -> None:
    """In a fresh one: after other tests' half formats this one's convolutions may round differently."""
    with process(call, *arguments, output=said) as called:
        called.join(timeout=60)
        assert called.exitcode == ends, said.read_text()


@pytest.mark.parametrize(
    ("killed_after", "more"),
    [
        pytest.param(6, {"train.max_steps": 6, "train.checkpoint_every": 3}, marks=SLOW, id="in the last one"),
        pytest.param(3, {"train.max_steps": 7, **EVERY_3}, marks=SLOW, id="in the middle"),
        pytest.param(6, {"train.max_steps": 7, **EVERY_3, **PLATEAU}, id="on a plateau"),
        pytest.param(
            6, {"train.epochs": 2, "train.checkpoint_every": 6}, marks=SLOW, id="at the end of the last epoch"
        ),
    ],
)
def test_a_run_killed_in_a_validation_validates_when_it_is_resumed(
    tmp_path: Path, killed_after: int, more: dict[str, Any]
) -> None:
    """The checkpoint of the same step was written just before."""
    flag, parts = tmp_path / "signal", tmp_path / "parts"
    checkpoint = parts / "checkpoints" / f"step-{killed_after:08d}"
    options = {"signal_file": str(flag), "signal": "SIGKILL", "signal_with": str(checkpoint)}
    overrides = config(more=more, **options)
    whole, said = tmp_path / "whole", tmp_path / "said"
    in_a_process(said, run, whole, overrides)
    flag.touch()
    in_a_process(said, run, parts, overrides, ends=-signal.SIGKILL)
    assert Checkpoints(parts / "checkpoints").list_all()[-1] == checkpoint
    in_a_process(said, resume, parts)
    assert_same_run(whole, parts)
    marks = [(one / "checkpoints" / "best.json").read_text() for one in (whole, parts)]
    assert marks[0] == marks[1]


@SLOW  # starts five processes
def test_a_longer_run_killed_in_its_last_validation_is_not_finished(tmp_path: Path) -> None:
    """The summary of its former end is there already."""
    flag, parts = tmp_path / "signal", tmp_path / "parts"
    options = {"signal_file": str(flag), "signal": "SIGKILL", "signal_with": str(parts)}
    overrides = config(more={"train.max_steps": 3, "train.checkpoint_every": 3}, **options)
    whole, said = tmp_path / "whole", tmp_path / "said"
    for one in (whole, parts):
        in_a_process(said, run, one, overrides)
    in_a_process(said, resume, whole, "train.max_steps=6")
    flag.touch()
    in_a_process(said, resume, parts, "train.max_steps=6", ends=-signal.SIGKILL)
    in_a_process(said, resume, parts)
    assert_same_run(whole, parts)
