"""What is put in Dynamo's way while a loss function is traced: it is gone afterwards, and only decides what is certain.

python_values.py has loops that need it."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._dynamo.variables import TensorVariable
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

import halfstep as hs
import python_values
from halfstep.fast import dynamo_gaps, traced
from replay_stand_in import replays_on_cpu


def read_hooks() -> list[Any]:
    handlers = TorchInGraphFunctionVariable._get_handlers()
    tables = [list(one.dispatch_table) for one in dynamo_gaps.TRANSLATORS]
    questions = [handlers[one] for one in dynamo_gaps.QUESTIONS]
    methods = dict(getattr(TensorVariable, "tp_methods", {}))
    return [tables, questions, methods, TensorVariable.method_requires_grad_]


def test_the_users_own_compiler_is_as_it_was() -> None:
    before = read_hooks()
    with replays_on_cpu():
        for name in ("context_variable", "layer_drop_by_chance"):
            python_values.assert_same(name, torch.device("cpu"))
    assert read_hooks() == before

    def compiled(x: Tensor) -> Tensor:
        return x * 2 if torch.compiler.is_compiling() else x

    run: Any = torch.compile(compiled, backend="eager", fullgraph=True)
    assert run(torch.ones(())) == 2

    def branching(x: Tensor) -> Tensor:
        return x if torch.rand([]) < 0 else x + 1

    refused: Any = torch.compile(branching, backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.TorchDynamoException):
        refused(torch.ones(()))


def train(get_loss: Any, fast: str, batch: Tensor) -> hs.Step:
    torch.manual_seed(0)
    layer = torch.nn.Linear(4, 3)
    with replays_on_cpu():
        step = hs.Step(layer, torch.optim.AdamW(layer.parameters(), fused=True), "fp32", fast=fast)  # type: ignore[arg-type]
        for _ in range(6):
            step(lambda x: get_loss(layer(x)), [batch])
    return step


def test_the_users_tensors_keep_their_marks() -> None:
    batch = torch.randn(2, 4)
    torch._dynamo.mark_static(batch, 1)
    before = copy.deepcopy(vars(batch))
    assert train(Tensor.mean, "graph", batch).mode == "graph"
    assert vars(batch) == before


def loop_here(x: Tensor, num: int) -> Tensor:
    if not torch.compiler.is_compiling():
        for _ in range(num):
            x = x * 1
    return x


def loop_while(x: Tensor, num: int) -> Tensor:
    done = torch.compiler.is_compiling() * num
    while done < num:
        x, done = x * 1, done + 1
    return x


def multiply(x: Tensor, num: int) -> Tensor:
    for _ in range(num):
        x = x * 1
    return x


def loop_in_a_helper(x: Tensor, num: int) -> Tensor:
    return x if torch.compiler.is_compiling() else multiply(x, num)


@pytest.mark.parametrize("loop", [loop_here, loop_while, loop_in_a_helper])
@pytest.mark.parametrize(("num", "is_traced"), [(20, True), (100, False)])
def test_the_eager_path_is_traced_unless_it_is_a_long_loop(num: int, is_traced: bool, loop: Any) -> None:
    step = train(lambda logits: loop(logits, num).mean(), "graph", torch.randn(2, 4))
    assert step.mode == "graph"
    (tracer,) = step._fast.tracers.values()
    assert (tracer.entries[0].num_nodes > num) == is_traced


def test_a_long_loop_is_traced_if_the_compiled_path_differs() -> None:
    def get_loss(logits: Tensor) -> Tensor:
        return (logits * 2 if torch.compiler.is_compiling() else multiply(logits, 100)).mean()

    step = train(get_loss, "graph", torch.randn(2, 4))
    assert step.mode == "graph"
    assert str(step.certificate).endswith("bit-equal to the eager step and its uncaptured code")


def test_what_dynamo_forbids_in_eager_code_leads_to_the_compiled_path() -> None:
    kept = torch.zeros(3)

    def get_loss(logits: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            torch._dynamo.mark_static_address(kept)
        return (logits + kept).mean()

    step = train(get_loss, "graph", torch.randn(2, 4))
    assert step.mode == "graph"
    # Its compiled path might differ for other values.
    assert "the eager step up to rounding" in str(step.certificate)


def test_an_assertion_of_the_loss_function_reaches_the_loop() -> None:
    layer, limits = torch.nn.Linear(4, 3), {"steps": 8}

    def loss_fn(x: Tensor) -> Tensor:
        assert limits["steps"], "no step is left"
        return layer(x).mean()

    with replays_on_cpu():
        step = hs.Step(layer, torch.optim.AdamW(layer.parameters(), fused=True), "fp32", fast="graph")
        for _ in range(8):
            step(loss_fn, [torch.randn(2, 4)])
        assert step.mode == "graph"
        limits["steps"] = 0
        with pytest.raises(AssertionError, match="no step is left"):
            step(loss_fn, [torch.randn(2, 4)])


def test_graphs_of_code_that_is_traced_anew_leave_their_places() -> None:
    """A mask that arrives later changes the path, and with it the code of all shapes."""
    layer = torch.nn.Linear(4, 3)

    def loss_fn(batch: Any) -> Tensor:
        x, mask = batch
        if not torch.compiler.is_compiling() and (mask is None or bool(mask.all())):
            return layer(x).mean()
        return (layer(x) * (1 if mask is None else mask)).mean()

    with replays_on_cpu():
        fast = hs.Fast("graph", max_graphs=2)
        step = hs.Step(layer, torch.optim.AdamW(layer.parameters(), fused=True), "fp32", fast=fast)
        for number in range(24):
            x = torch.randn(2 + number % 2, 4)
            step(loss_fn, [(x, None if number < 12 else torch.ones(len(x), 1))])
    assert len(step._fast.level.graphs) == 2
    assert {graph.used_at for graph in step._fast.level.graphs.values()} == {22, 23}


@pytest.mark.parametrize("kind", ["random", "numpy"])
def test_torch_gives_no_advice_on_what_nobody_asked_for(
    kind: str, capfd: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder
) -> None:
    draw = {"random": random.random, "numpy": np.random.default_rng(0).random}[kind]
    assert train(lambda logits: logits.mean() * draw(), "graph", torch.randn(2, 4)).mode == "eager"
    assert [line.partition(":")[0] for line in capfd.readouterr().err.splitlines()] == ["halfstep"]
    assert not recwarn.list


def trace(run: Any) -> torch.fx.GraphModule:
    graphs: list[torch.fx.GraphModule] = []
    torch.compile(run, backend=lambda module, _: graphs.append(module) or module, fullgraph=True)(torch.ones(2))
    return graphs[0]


@pytest.mark.parametrize(
    ("condition", "truth"),
    [
        (lambda x: torch.rand([]) < 0, False),
        (lambda x: torch.rand([]) >= 0, True),
        (lambda x: torch.rand(1) < 1.0, True),
        (lambda x: torch.rand([]) <= 0, None),
        (lambda x: torch.rand([]) < 0.999, None),
        (lambda x: torch.rand([]) < x.sum(), None),
        (lambda x: torch.rand([]).mul_(2) >= 1, None),
        (lambda x: torch.randn([]) < 0, None),
        (lambda x: torch.zeros(3).any(), False),
        (lambda x: (torch.arange(3) == torch.tensor([0, 1, 2])).all(), True),
        (lambda x: x.new_zeros(2).sum() == 0, True),
        (lambda x: torch.ones(2).mul_(x).all(), None),
        (lambda x: (x == x).all(), None),
    ],
)
def test_only_certain_branches_are_decided(condition: Any, truth: bool | None) -> None:
    outputs: Any = trace(condition).graph.output_node().args[0]
    assert dynamo_gaps.find_truth(outputs[0]) is truth


def test_draws_on_the_host_advance_its_generator() -> None:
    """Find what a model on a GPU draws on the CPU."""

    def draw(x: Tensor) -> Tensor:
        torch.rand([])
        torch.randint(0, 9, (3,))
        return x + 1

    graph = trace(draw)
    torch.manual_seed(0)
    draw(torch.ones(2))
    state = torch.get_rng_state()
    torch.manual_seed(0)
    assert not traced.find_host_draws(graph, torch.device("cpu"))
    for one in traced.find_host_draws(graph, torch.device("cuda")):
        one()
    assert torch.equal(torch.get_rng_state(), state)
