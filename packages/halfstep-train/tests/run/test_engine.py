"""The engine around a captured step: when it captures, when it must not go on with what it has, what it gives up.

A CUDA graph needs a GPU. Here its place is taken by the very computations it would hold, without what a replay does not
do: no table grows and no generator is read. tests/gpu has the real one.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from halfstep.step import tables as tabulated
from halfstep.step.facts import Facts
from halfstep.step.graph import Batch, CaptureFailed, GraphedStep, list_tables
from halfstep.step.step import GuardedStep, LossFn
from halfstep_train.kernels.fast_forms import is_forced_on
from halfstep_train.run import engine as engine_module
from halfstep_train.run.engine import Engine
from halfstep_train.tune.modes import UNCAPTURED
from whole_runs import TINY, assemble_run, config_of


class OnTheHost(GraphedStep):
    """Computes what a graph would replay."""

    def __init__(self, step: GuardedStep, loss_fn: LossFn, window: list[Batch], pool: Any) -> None:
        if not all(committer.stepped for committer in step.committers):
            raise CaptureFailed("an optimizer has not taken its first step")
        self.step, self.generation = step, step.generation
        self.tables = list_tables(step)
        with torch.random.fork_rng():
            for batch in window:
                loss_fn(batch)

    def __call__(self, window: list[Batch]) -> Facts:
        facts = self.step.forward_backward(
            lambda batch: cross_entropy(self.step.model(batch["image"]), batch["label"]), window
        )
        self.step.commit_on_device(facts)
        self.step.attempted += 1
        facts.send()
        return facts


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    """Of the tiny workload, as if it could be captured; a notice is a failure."""
    monkeypatch.setattr(engine_module, "GraphedStep", OnTheHost)
    parts = assemble_run(config_of({**TINY, "train.epochs": 100}))
    parts.region = parts.eager
    return Engine(parts, "graph", lambda text, level: pytest.fail(text))


def window(engine: Engine) -> list[Batch]:
    return [next(engine.parts.train_loader.iterate_epoch(0))]


def test_a_captured_step_outlives_the_table_of_learning_rates(monkeypatch: pytest.MonkeyPatch, engine: Engine) -> None:
    monkeypatch.setattr(tabulated, "CPU_CHUNK", 4)
    table = engine.parts.step.rates
    assert table is not None
    table.table, table._num_filled = table.table[:, :6].contiguous(), 6
    expected = [float(table.base[0]) * table.functions[0](k) for k in range(16)]
    found = [engine(window(engine)).read().lr for _ in range(16)]
    assert found == pytest.approx(expected)
    assert engine.graphs


def test_after_a_rollback_to_the_start_the_step_is_captured_again(engine: Engine) -> None:
    start = copy.deepcopy(engine.parts.step.state_dict())
    for _ in range(UNCAPTURED + 2):
        engine(window(engine))
    engine.parts.step.load_state_dict(start)
    for _ in range(UNCAPTURED + 1):
        engine(window(engine))
    assert engine.mode == "graph"
    assert all(captured.step.is_valid for captured in engine.graphs.values())


def test_out_of_memory_while_capturing_does_not_draw_a_steps_random_numbers_again(
    monkeypatch: pytest.MonkeyPatch, engine: Engine
) -> None:
    said: list[str] = []
    engine.notice = lambda text, level: said.append(text)
    object.__setattr__(engine.parts.train, "auto_batch", True)
    for _ in range(UNCAPTURED):
        engine(window(engine))
    generator = torch.get_rng_state()

    def full(*args: Any) -> None:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(engine_module, "GraphedStep", full)
    facts = engine(window(engine))
    assert "micro-batches of 2" in said[0]
    assert torch.equal(facts.rng["cpu"], generator)


def test_a_step_that_does_not_fit_beside_the_graph_gets_its_memory_and_the_step_is_captured_again(
    engine: Engine,
) -> None:
    said: list[str] = []
    engine.notice = lambda text, level: said.append(text)
    eager = engine.parts.eager

    def needs_the_graphs_memory(batch: Batch) -> Any:
        if engine.graphs and len(batch["image"]) == 3:
            raise torch.OutOfMemoryError("out of memory")
        return eager(batch)

    engine.parts.eager = needs_the_graphs_memory
    full = window(engine)
    odd = [{name: value[:3] for name, value in full[0].items()}]
    for times in range(1, engine_module.MOST_DROPS + 2):
        for _ in range(UNCAPTURED + 1):
            engine(full)
        assert len(engine.graphs) == 1
        attempted = engine.parts.step.attempted
        assert not engine(odd).read().is_bad
        assert engine.parts.step.attempted == attempted + 1
        assert not engine.graphs
        assert len(said) == times
    assert "captured again (3 of at most 3 times)" in said[-2]
    assert engine.mode == "compile"
    assert "steps outside of the graph needed its memory 4 times" in said[-1]
    engine(odd)
    assert len(said) == times


def test_any_failure_of_code_that_was_never_compiled_leaves_eager_steps(engine: Engine) -> None:
    said: list[str] = []
    engine.notice = lambda text, level: said.append(text)

    def region(batch: Batch) -> Any:
        raise RuntimeError("Failed to find C compiler. Please specify via CC\nand pages more")

    engine.parts.region = region
    assert not engine(window(engine)).read().is_bad
    assert said == ["not compiled, running eager: Failed to find C compiler. Please specify via CC"]
    assert engine.parts.step.attempted == 1


def test_what_fails_after_it_was_compiled_is_not_hidden(engine: Engine) -> None:
    engine(window(engine))

    def region(batch: Batch) -> Any:
        raise RuntimeError("a bug of the user's own")

    engine.parts.region = region
    with pytest.raises(RuntimeError, match="of the user's own"):
        engine(window(engine))
    assert engine.parts.step.attempted == 1


@pytest.mark.parametrize(("is_deterministic", "wanted"), [(False, [True, False]), (True, [False, False])])
def test_cudnn_tries_its_algorithms_for_full_batches_only_and_never_where_bits_must_repeat(
    engine: Engine, is_deterministic: bool, wanted: list[bool]
) -> None:
    parts, seen = engine.parts, list[bool]()
    parts.plan = dataclasses.replace(parts.plan, cudnn_benchmark=True)
    object.__setattr__(parts.train, "deterministic", is_deterministic)
    eager = parts.eager

    def watched(batch: Batch) -> Any:
        seen.append(torch.backends.cudnn.benchmark)
        return eager(batch)

    parts.region = parts.eager = watched
    full = window(engine)
    engine(full)
    engine([{name: value[:3] for name, value in full[0].items()}])
    assert seen == wanted
    assert not torch.backends.cudnn.benchmark


def test_chains_of_our_kernels_run_in_captured_steps_only(engine: Engine) -> None:
    seen: list[bool] = []
    eager = engine.parts.eager

    def region(batch: Batch) -> tuple[torch.Tensor, torch.Tensor | float, Any]:
        seen.append(is_forced_on("chain", otherwise=True))
        return eager(batch)

    engine.parts.region = region
    batch = next(iter(engine.parts.train_loader.iterate_epoch(0)))
    engine([batch])
    engine.mode = "compile"
    engine([batch])
    assert seen == [True, False]


def test_compiling_anew_after_a_failed_capture_is_announced_too(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*arguments: object) -> None:
        raise CaptureFailed("it waits for the device")

    monkeypatch.setattr(engine_module, "GraphedStep", fails)
    said: list[str] = []
    engine.notice = lambda text, level: said.append(text)
    engine._before_compiling = lambda: said.append("compiling")
    batch = next(iter(engine.parts.train_loader.iterate_epoch(0)))
    for _ in range(UNCAPTURED + 2):
        engine([batch])
    assert said == ["compiling", "not captured as a CUDA graph, running compiled: it waits for the device", "compiling"]
