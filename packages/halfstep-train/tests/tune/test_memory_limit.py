"""Out of memory: a clear error wherever it happens, and no sample counted twice when the run goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from halfstep.errors import MemoryLimitError
from halfstep.step.step import GuardedStep
from halfstep_train.run import engine, loop
from halfstep_train.run import train as training
from halfstep_train.run.loop import Loop
from whole_runs import newest, run


def fail_once(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, *, at_call: int, after: bool = False) -> None:
    """No small machine runs out of memory on request, so torch's error comes from the call of this number."""
    original, calls = getattr(owner, name), iter(range(1, 10**6))

    def call(*args: Any, **more: Any) -> Any:
        is_it = next(calls) == at_call
        result = None if is_it and not after else original(*args, **more)
        if is_it:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return result

    monkeypatch.setattr(owner, name, call)


@pytest.mark.parametrize(
    ("owner", "name", "at_call"), [(GuardedStep, "commit", 8), (engine, "match_layout", 8), (loop, "validate", 2)]
)
def test_it_is_a_clear_error_wherever_it_happens_and_keeps_the_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, at_call: int
) -> None:
    fail_once(monkeypatch, owner, name, at_call=at_call)
    with pytest.raises(MemoryLimitError, match="out of memory on cpu") as failed:
        run(tmp_path / "run", {"train.epochs": 3, "train.auto_batch": True})
    assert "Tried to allocate 2 GiB" in failed.value.why
    assert newest(tmp_path / "run").state["step"]["attempted"] == 6


def test_a_window_that_starts_over_counts_its_samples_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_once(monkeypatch, GuardedStep, "compute", at_call=2, after=True)
    counted: list[int] = []
    original = Loop._end_epoch

    def end_epoch(running: Loop) -> None:
        counted.append(int(running.train_metrics.state_dict()["accuracy"][1]))
        original(running)

    monkeypatch.setattr(Loop, "_end_epoch", end_epoch)
    run(tmp_path / "run", {"train.epochs": 2, "train.accumulate": 2, "train.auto_batch": True})
    assert counted == [22, 22]


def test_validation_gets_the_memory_of_captured_steps_before_it_gives_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_once(monkeypatch, loop, "validate", at_call=1)
    original = Loop._validate

    def with_a_graph(running: Loop, epoch: int, *, in_turn: bool) -> bool:
        running.engine.graphs[("a shape",)] = None  # type: ignore[assignment]
        found = original(running, epoch, in_turn=in_turn)
        assert running.engine.graphs == {}
        return found

    monkeypatch.setattr(Loop, "_validate", with_a_graph)
    run(tmp_path / "run", {"train.epochs": 1})
    assert newest(tmp_path / "run").state["position"]["epoch"] == 1


def test_a_model_that_does_not_fit_by_itself_is_a_clear_error_and_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_once(monkeypatch, training, "assemble", at_call=1)
    with pytest.raises(MemoryLimitError, match="does not fit on cpu, even without a batch") as failed:
        run(tmp_path / "run", {"ema.enabled": True})
    assert "Tried to allocate 2 GiB" in failed.value.why
    assert "bf16-true" in failed.value.fix
    assert "ema.enabled=false" in failed.value.fix
    assert "batch_size" not in failed.value.fix
    assert not (tmp_path / "run").exists()
