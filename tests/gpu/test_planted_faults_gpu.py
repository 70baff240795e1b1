"""Faults planted into CUDA graphs are found before a graph is used, or by a check while training goes on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from halfstep.fast import fast_path as fast
from halfstep.step.graph import GraphedStep
from planted_faults import (
    FACTOR,
    WriteOnTheSide,
    assert_found_before_use,
    assert_found_by_check,
    edit_replays,
    get_loss,
    get_scaled_loss,
    train,
)

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")


@pytest.fixture(autouse=True)
def _start_afresh() -> Any:
    torch._dynamo.reset()
    yield
    FACTOR[0] = 1.0


def test_without_a_fault_nothing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    step, said = train(CUDA, monkeypatch, get_loss, dropout=0.3)
    assert (step.mode, said) == ("graph", [])
    assert step.certificate.num_checks >= 3


def test_a_custom_operator_that_reads_a_global(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(model: nn.Module) -> None:
        FACTOR[0] = 2.0

    assert_found_by_check(*train(CUDA, monkeypatch, get_scaled_loss, change))


def test_a_stale_address(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(model: nn.Module) -> None:
        model[0].weight.data = model[0].weight.data.clone()  # type: ignore[index, union-attr]

    step, said = train(CUDA, monkeypatch, get_loss, change)
    assert (step.mode, said) == ("graph", [])
    monkeypatch.setattr(fast, "CAPTURES", {})
    eager, _ = train(CUDA, monkeypatch, get_loss, change)
    assert eager.mode == "eager"
    assert all(map(torch.equal, step._step.model.parameters(), eager._step.model.parameters()))


def test_random_numbers_at_a_wrong_offset(monkeypatch: pytest.MonkeyPatch) -> None:
    with edit_replays(monkeypatch, CUDA, lambda replay: torch.rand(3, device=CUDA)):
        assert_found_before_use(*train(CUDA, monkeypatch, get_loss, dropout=0.5))


def test_a_tensor_changed_on_the_side(monkeypatch: pytest.MonkeyPatch) -> None:
    with edit_replays(monkeypatch, CUDA, WriteOnTheSide()):
        assert_found_by_check(*train(CUDA, monkeypatch, get_loss))


def test_a_missing_wait_for_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    side = torch.cuda.Stream()

    class Hasty(GraphedStep):
        def _replay(self, window: Any) -> None:
            with torch.cuda.stream(side):
                torch.cuda._sleep(50_000_000)
                for own, batch in zip(self.inputs, window, strict=True):
                    for name, value in batch.items():
                        if value.is_floating_point():
                            own[name].copy_(value, non_blocking=True)
            for own, batch in zip(self.inputs, window, strict=True):
                for name, value in batch.items():
                    if not value.is_floating_point():  # labels that are no class would end the process
                        own[name].copy_(value)
            self.graph.replay()

    monkeypatch.setitem(fast.CAPTURES, "cuda", (Hasty, Hasty))
    step, said = train(CUDA, monkeypatch, get_loss)
    assert_found_by_check(step, said)
