"""Batches whose images change in size: compiled code for two of them, eager steps for the others, one line why."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import interpolate

import tiny_workload
from halfstep.data.seeds import generator_for
from halfstep.hardware.probe import probe
from halfstep.run.assemble import assemble, build_workload, plan_for
from halfstep.run.checkpoint import Checkpoint
from halfstep.run.engine import Engine
from halfstep.run.train import train
from halfstep.tune.compiling import CompiledShapes
from halfstep.tune.modes import UNCAPTURED, Batch, Region
from halfstep.workloads import load
from halfstep.workloads.workload import Workload
from tiny_training import assert_same_bits
from whole_runs import TINY, newest, resume


class AnySize(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(2, 4, 3), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.head(self.conv(x).mean((2, 3)))
        return scores


def size_of(key: tuple[int, ...]) -> int:
    return 8 + 2 * int(torch.randint(5, (), generator=generator_for(*key)))


def build(config: Any, store: Any = None) -> Workload:
    """The tiny workload, with each step's images in one of five sizes."""

    def prepare(batch: Batch, *, key: tuple[int, ...], training: bool) -> Batch:
        side = size_of(key) if training else 8
        return batch | {"image": interpolate(batch["image"], size=(side, side))}

    return dataclasses.replace(tiny_workload.build(config, store), model=AnySize(), prepare=prepare)


def loaded(**settings: Any) -> Any:
    values = {**TINY, **{name.replace("__", "."): value for name, value in settings.items()}}
    return load("test_compiled_shapes:build", overrides=[f"{key}={json.dumps(value)}" for key, value in values.items()])


class Told:
    """An engine of the tiny workload, what it said, and the sizes that went through compiled code."""

    def __init__(self, mode: Any = "compile", **settings: Any) -> None:
        config = loaded(**settings).config
        workload = build_workload(config)
        parts = assemble(config, workload, plan_for(config, workload, probe("cpu")))
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
    assert "more than 2 shapes (now image 4x2x12x12)" in line
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


def test_another_layout_or_dtype_is_named_where_the_size_is_known() -> None:
    shapes = CompiledShapes()
    image = torch.ones(4, 2, 8, 6)
    assert shapes.take({"image": image})
    assert shapes.take({"image": image.half()})
    turned = {"image": image.contiguous(memory_format=torch.channels_last)}
    assert not shapes.take(turned)
    assert "image 4x2x8x6 of float32, strides (96, 1, 12, 2)" in shapes.why_eager(turned)
    assert shapes.why_eager(turned) == ""


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


def test_a_run_that_could_not_compile_a_second_shape_stays_eager_when_it_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def of_one_size(region: Region, **options: Any) -> Region:
        compiled = rounding(region)

        def only(batch: Batch) -> Any:
            if batch["image"].shape[-1] != first:
                raise RuntimeError("no code for this size")
            return compiled(batch)

        return only

    first = size_of((loaded().config.train.seed, 0, 0))
    monkeypatch.setattr(torch, "compile", of_one_size)
    left, right = whole_and_resumed(tmp_path)
    assert left.state["mode"] == right.state["mode"] == "eager"
    assert_same_bits(left.model, right.model)


@pytest.mark.parametrize("name", ["mode", "way"])
def test_a_resumed_engine_reads_its_mode_under_the_name_of_today_and_of_older_runs(name: str) -> None:
    told = Told()
    told.engine.go_on({"pieces": 1, name: "eager"}, is_same=True)
    assert told.engine.mode == "eager"


def test_a_resumed_engine_tries_nothing_faster_that_failed_and_nothing_slower_unasked() -> None:
    told = Told()
    told.engine.go_on_as("graph")
    assert (told.engine.mode, told.said) == ("compile", [])
    told.engine.go_on_as("eager")
    assert told.engine.mode == "eager"
    assert "steps run eager, as they did when the run was stopped" in told.said[0]
