"""Which shapes are compiled, why code could not be, and what the compiler warns of in one line."""

from __future__ import annotations

import dataclasses
import json
import logging
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import interpolate

import halfstep as hs
import tiny_workload
from halfstep_train.data.loader import make_generator
from halfstep_train.run.checkpoint import Checkpoint
from halfstep_train.run.engine import Engine
from halfstep_train.run.train import train
from halfstep_train.tune.compiling import CompiledShapes, CompilerWarnings, explain_compile_error
from halfstep_train.tune.modes import UNCAPTURED, Batch, Region, compile_region
from halfstep_train.workloads import load
from halfstep_train.workloads.base.workload import Workload
from tiny_training import assert_same_bits
from whole_runs import TINY, assemble_run, newest, resume


@torch.library.custom_op("halfstep_tests::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def test_an_operation_the_compiler_knows_nothing_of_is_named() -> None:
    torch.compiler.reset()
    with pytest.raises(Exception, match="fake") as failed:
        torch.compile(lambda x: twice(x) + 1, backend="eager")(torch.ones(2))
    reason = explain_compile_error(failed.value)
    assert "halfstep_tests::twice" in reason
    assert "\n" not in reason


def test_what_a_linker_said_is_found_below_its_command() -> None:
    text = """CppCompileError: C++ compile error

        Command:
        g++ x.cpp -o x.so

        Output:
        x.h:741:5: note: parameter passing changed in GCC 10.1
        /usr/bin/ld: final link failed: No space left on device
        collect2: error: ld returned 1 exit status"""
    error = RuntimeError(text)
    error.__cause__ = subprocess.CalledProcessError(1, ["g++", "x.cpp"])
    wanted = "CppCompileError: C++ compile error: /usr/bin/ld: final link failed: No space left on device"
    assert explain_compile_error(error) == wanted


def test_a_command_that_failed_is_not_repeated_and_an_error_alone_is_its_first_line() -> None:
    error = RuntimeError("Failed to find C compiler\nand pages more")
    error.__cause__ = subprocess.CalledProcessError(1, ["cc"])
    assert explain_compile_error(error) == "Failed to find C compiler"


def test_what_a_users_own_error_was_raised_beside_is_not_added() -> None:
    error = ValueError("no size was given")
    error.__context__ = KeyError("size")
    assert explain_compile_error(error) == "no size was given"


class AnySize(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(2, 4, 3), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.head(self.conv(x).mean((2, 3)))
        return scores


def size_of(key: tuple[int, ...]) -> int:
    return 8 + 2 * int(torch.randint(5, (), generator=make_generator(*key)))


def build(config: Any, store: Any = None) -> Workload:
    """The tiny workload, with each step's images in one of five sizes."""

    def prepare(batch: Batch, *, key: tuple[int, ...], training: bool) -> Batch:
        side = size_of(key) if training else 8
        return batch | {"image": interpolate(batch["image"], size=(side, side))}

    return dataclasses.replace(tiny_workload.build(config, store), model=AnySize(), prepare=prepare)


def loaded(**settings: Any) -> Any:
    values = {**TINY, **{name.replace("__", "."): value for name, value in settings.items()}}
    return load("test_compiling:build", overrides=[f"{key}={json.dumps(value)}" for key, value in values.items()])


class Told:
    """An engine of the tiny workload, what it said, and the sizes that went through compiled code."""

    def __init__(self, mode: Any = "compile", **settings: Any) -> None:
        parts = assemble_run(loaded(**settings).config)
        self.said: list[str] = []
        self.sizes: list[int] = []
        eager = parts.eager

        def region(batch: Batch) -> Any:
            self.sizes.append(batch["image"].shape[-1])
            return eager(batch)

        parts.region = region
        self.engine = Engine(
            parts,
            mode,
            lambda text, level: self.said.append(text),
            before_compiling=lambda: self.said.append("compiling"),
        )

    def step(self, *sizes: int) -> None:
        batches = [
            {"image": torch.ones(4, 2, size, size), "label": torch.zeros(4, dtype=torch.int64)} for size in sizes
        ]
        self.engine.step(batches)


def test_two_shapes_are_compiled_and_announced_and_further_ones_run_eager_with_one_line() -> None:
    told = Told()
    for size in (8, 8, 10, 12, 14, 8, 10, 12):
        told.step(size)
    assert told.sizes == [8, 8, 10, 8, 10]
    assert told.said[:2] == ["compiling", "compiling"]
    (line,) = told.said[2:]
    assert "more than 2 shapes (now image 4x2x12x12 of float32, strides (288, 144, 12, 1), label 4 of int64" in line
    assert "one size for all, or padding" in line
    assert told.engine.mode == "compile"


def test_a_window_of_three_shapes_compiles_for_two_of_them() -> None:
    told = Told(train__accumulate=3)
    told.step(8, 10, 12)
    assert told.sizes == [8, 10]
    assert [line == "compiling" for line in told.said] == [False, True]


def test_smaller_micro_batches_have_room_for_two_shapes_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    told = Told(train__auto_batch=True)
    told.step(8)
    told.step(10)
    compute = told.engine.parts.step.compute

    def full_once(*arguments: Any) -> Any:
        monkeypatch.setattr(told.engine.parts.step, "compute", compute)
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(told.engine.parts.step, "compute", full_once)
    told.step(12)
    told.step(14)
    assert told.sizes == [8, 10, 12, 12, 14, 14]


def test_a_shape_without_compiled_code_is_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    told = Told("graph")
    monkeypatch.setattr(told.engine, "_capture", lambda shape, window: pytest.fail("captured"))
    for size in (8, 10, *[12] * (UNCAPTURED + 2)):
        told.step(size)
    assert told.engine.mode == "graph"


def test_what_fails_while_a_second_shape_is_compiled_leaves_eager_steps() -> None:
    told = Told()
    told.step(8)

    def region(batch: Batch) -> Any:
        raise RuntimeError("no space left for code")

    told.engine.parts.region = region
    told.step(10)
    assert told.said[-1] == "not compiled, running eager: no space left for code"
    assert told.engine.parts.step.attempted == 2


def test_another_layout_or_dtype_is_another_shape() -> None:
    shapes = CompiledShapes()
    image = torch.ones(4, 2, 8, 6)
    assert shapes.admit({"image": image})
    assert shapes.admit({"image": image.half()})
    turned = {"image": image.contiguous(memory_format=torch.channels_last)}
    assert not shapes.admit(turned)
    assert "image 4x2x8x6 of float32, strides (96, 1, 12, 2)" in shapes.explain_eager(turned)
    assert shapes.explain_eager(turned) == ""


def rounding(region: Region, **options: Any) -> Region:
    """Compiled code rounds differently; here it differs by far more, so that one shape mistaken shows."""

    def compiled(batch: Batch) -> Any:
        loss, weight, outputs = region(batch)
        return loss * 1.5, weight, outputs

    return compiled


COMPILED = {"train__fast": "compile", "train__epochs": 3, "schedule__name": "constant", "schedule__warmup_steps": 0}


def whole_and_resumed(folder: Path) -> tuple[Checkpoint, Checkpoint]:
    """The end of a run, and of the same one stopped after six steps and resumed."""
    whole = train(loaded(**COMPILED), out=folder / "whole")
    part = train(loaded(**COMPILED, train__max_steps=6), out=folder / "part")
    resume(part, "train.max_steps=0")
    return newest(whole), newest(part)


def test_a_resumed_run_compiles_for_the_shapes_the_run_began_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", rounding)
    left, right = whole_and_resumed(tmp_path)
    assert len(left.state["compiled_shapes"]) == 2
    assert left.state["compiled_shapes"] == right.state["compiled_shapes"]
    assert_same_bits(left.model, right.model)


def test_a_resumed_engine_tries_nothing_faster_that_failed_and_nothing_slower_unasked() -> None:
    told = Told()
    told.engine.fall_back_to("graph")
    assert (told.engine.mode, told.said) == ("compile", [])
    told.engine.fall_back_to("eager")
    assert told.engine.mode == "eager"
    assert "steps run in eager mode, as when the run was stopped" in told.said[0]


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.LogCaptureFixture]:
    """torch's loggers pass nothing up; here they do. The user has not asked for their messages."""
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
    with CompilerWarnings(said.append).shorten_warnings():
        for _ in range(12):
            model(torch.ones(2))


def broken_by_a_number(said: list[str]) -> None:
    def doubled(x: torch.Tensor) -> torch.Tensor:
        return x * x.mean().item()

    with CompilerWarnings(said.append).shorten_warnings():
        torch.compile(doubled, backend="eager")(torch.ones(2))


def warned(log: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in log.records if record.levelno >= logging.WARNING]


def test_a_model_that_is_compiled_anew_too_often_is_told_once_with_the_reason(log: pytest.LogCaptureFixture) -> None:
    said: list[str] = []
    recompiled_too_often(said)
    assert len(said) == 1
    assert "recompiled too often" in said[0]
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
    assert "test_compiling.py:" in said[0]
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
    with CompilerWarnings(pytest.fail).shorten_warnings():
        logger.warning("something else")
    assert warned(log) == ["something else"]
    assert logger.filters == []


def test_compiled_code_computes_the_gradients_of_fp32_code_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    real: Any = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, dynamic, options: real(f, dynamic=dynamic, backend="aot_eager"))
    torch.manual_seed(0)
    half, whole = nn.Linear(4, 4), nn.Linear(4, 4)

    def region(batch: Batch) -> Any:
        hidden = half(batch["x"])
        with hs.fp32_island():
            return whole(hidden.float()).square().mean(), 1.0, None

    found = []
    for run in (region, compile_region(region)):
        with torch.autocast("cpu", torch.bfloat16):
            loss = run({"x": torch.ones(2, 4)})[0]
        found.append(torch.autograd.grad(loss, [*half.parameters(), *whole.parameters()]))
    assert_same_bits(*({str(number): one for number, one in enumerate(gradients)} for gradients in found))
