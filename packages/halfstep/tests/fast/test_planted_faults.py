"""Faults in captured steps are found before a graph is used, or by a check while training goes on."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import planted_faults
from halfstep.fast import fast_path as fast
from planted_faults import (
    FACTOR,
    WriteOnTheSide,
    assert_found_before_use,
    assert_found_by_check,
    edit_replays,
    get_loss,
    train,
)
from replay_stand_in import replays_on_cpu

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _replay_on_cpu() -> Any:
    with replays_on_cpu():
        yield
    FACTOR[0] = 1.0


def test_without_a_fault_nothing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    step, said = train(CPU, monkeypatch, get_loss, dropout=0.3)
    assert (step.mode, said) == ("graph", [])
    assert step.certificate.num_checks >= 3
    assert "checked" in str(step.certificate)


def test_python_code_that_no_guard_covers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HALFSTEP_TEST_FACTOR", "1.0")

    def loss_of(model: nn.Module, batch: Any) -> Tensor:
        return get_loss(model, batch) * float(os.environ["HALFSTEP_TEST_FACTOR"])

    change = lambda model: monkeypatch.setenv("HALFSTEP_TEST_FACTOR", "3.0")  # noqa: E731
    step, said = train(CPU, monkeypatch, loss_of, change)
    if said:
        assert_found_by_check(step, said)
        return
    # This version of torch guards the variable: then the replays must have followed it.
    monkeypatch.setenv("HALFSTEP_TEST_FACTOR", "1.0")
    captures = fast.CAPTURES.pop("cpu")
    eager, _ = train(CPU, monkeypatch, loss_of, change)
    fast.CAPTURES["cpu"] = captures
    assert (step.mode, eager.mode) == ("graph", "eager")
    assert all(map(torch.equal, step._step.model.parameters(), eager._step.model.parameters()))


def test_random_numbers_at_a_wrong_offset(monkeypatch: pytest.MonkeyPatch) -> None:
    with edit_replays(monkeypatch, CPU, lambda replay: torch.rand(3)):
        assert_found_before_use(*train(CPU, monkeypatch, get_loss, dropout=0.5))


def test_a_tensor_changed_on_the_side(monkeypatch: pytest.MonkeyPatch) -> None:
    with edit_replays(monkeypatch, CPU, WriteOnTheSide()):
        step, said = train(CPU, monkeypatch, get_loss)
    assert_found_by_check(step, said)


def test_a_declared_operator_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    step, said = train(CPU, monkeypatch, planted_faults.get_scaled_loss)
    assert (step.mode, said) == ("graph", [])
