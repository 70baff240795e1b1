"""A model that the compiler cannot take whole: one line each instead of the compiler's screens."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch

from halfstep.tune.compiling import CompilerWarnings


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.LogCaptureFixture]:
    """torch's loggers pass nothing up; here they do. Nobody has asked for their words."""
    monkeypatch.delenv("TORCH_LOGS", raising=False)
    logger = logging.getLogger("torch._dynamo")
    former = logger.propagate
    logger.propagate = True
    torch.compiler.reset()
    yield caplog
    logger.propagate = former
    torch.compiler.reset()


def counting() -> torch.nn.Module:
    class Counting(torch.nn.Module):
        num = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.num += 1
            return x * (1 + self.num)

    return Counting()


def recompiled_too_often(said: list[str]) -> None:
    model = torch.compile(counting(), backend="eager", dynamic=False)
    with CompilerWarnings(said.append).in_one_line():
        for _ in range(12):
            model(torch.ones(2))


def broken_by_a_number(said: list[str]) -> None:
    def doubled(x: torch.Tensor) -> torch.Tensor:
        return x * x.mean().item()

    with CompilerWarnings(said.append).in_one_line():
        torch.compile(doubled, backend="eager")(torch.ones(2))


def warned(log: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in log.records if record.levelno >= logging.WARNING]


def test_a_model_that_is_compiled_anew_too_often_is_told_once_with_the_reason(log: pytest.LogCaptureFixture) -> None:
    said: list[str] = []
    recompiled_too_often(said)
    assert len(said) == 1
    assert "compiled again too often" in said[0]
    assert "num == " in said[0]
    assert "\n" not in said[0]
    assert warned(log) == []


def test_with_torch_logs_the_compilers_own_words_stay(
    log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_LOGS", "recompiles")
    said: list[str] = []
    recompiled_too_often(said)
    assert len(said) == 1
    assert any("recompile_limit" in text for text in warned(log))


def test_a_number_read_from_a_tensor_is_named_with_its_line(log: pytest.LogCaptureFixture) -> None:
    said: list[str] = []
    broken_by_a_number(said)
    assert len(said) == 1
    assert "`Tensor.item()` waits for the device" in said[0]
    assert said[0].endswith("x * x.mean().item()")
    assert "test_compiler_warnings.py:" in said[0]
    assert warned(log) == []


def test_a_run_hears_of_a_break_that_its_trial_met_before_it() -> None:
    of_a_trial, of_the_run = list[str](), list[str]()
    broken_by_a_number(of_a_trial)
    torch.compiler.reset()
    broken_by_a_number(of_the_run)
    assert of_the_run == of_a_trial
    assert len(of_the_run) == 1


def test_other_warnings_pass_and_nothing_is_left_behind(log: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("torch._dynamo.convert_frame")
    with CompilerWarnings(pytest.fail).in_one_line():
        logger.warning("something else")
    assert warned(log) == ["something else"]
    assert logger.filters == []
