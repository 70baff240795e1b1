"""Loops of a user's own with one fault each, for replay_causes.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import halfstep as hs
from halfstep.evidence import causes

Batch = dict[str, Tensor]
COUNTS = torch.tensor([30.0, 12.0, 0.0, 7.0])


class Loop(NamedTuple):
    """What a user gives hs.Step, and calls it with."""

    expected: str
    model: nn.Module
    loss_fn: Callable[[Batch], Tensor]
    batches: list[Batch]
    options: dict[str, Any]
    lr: float = 1e-3
    sample: str = ""
    place: str = ""
    change: str = ""


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))


def batches(num: int = 8) -> list[Batch]:
    return [{"x": torch.randn(8, 16), "y": torch.randint(0, 4, (8,))} for _ in range(num)]


class Ranked(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * (x > torch.quantile(x, 0.8, dim=1, keepdim=True))


def quantile() -> Loop:
    """Which refuses bf16."""
    model = nn.Sequential(nn.Linear(16, 32), Ranked(), nn.Linear(32, 4))
    options = {"precision": hs.Precision("bf16", simulate=True)}
    return Loop(causes.REFUSED, model, lambda b: F.cross_entropy(model(b["x"]), b["y"]), batches(), options)


def teacher() -> Loop:
    """One of its weights was too large for the file's format."""
    student, teacher = network(), network().requires_grad_(False)
    teacher[0].weight[5, 3] = torch.inf

    def loss_fn(batch: Batch) -> Tensor:
        return F.kl_div(student(batch["x"]).log_softmax(1), teacher(batch["x"]).softmax(1), reduction="batchmean")

    return Loop(causes.BAD_STATE, student, loss_fn, batches(), {"also": [teacher]})


def class_weights() -> Loop:
    """By counts, one of which is 0."""
    model, weights = network(), COUNTS.sum() / COUNTS
    return Loop(
        causes.BAD_STATE, model, lambda b: F.cross_entropy(model(b["x"]), b["y"], weight=weights), batches(), {}
    )


def sign() -> Loop:
    """An error is made as large as can be."""
    model = nn.Sequential(nn.Linear(16, 16), nn.Softplus(), nn.Linear(16, 16), nn.Softplus(), nn.Linear(16, 1))
    same = batches(1) * 200
    return Loop(causes.DIVERGED, model, lambda b: -(model(b["x"])[:, 0] - b["x"].sum(1)).square().mean(), same, {}, 0.5)


def without_maximum(graph: fx.GraphModule, inputs: Any) -> Any:
    """A compiler that makes logsumexp of exp, sum and log."""
    for node in [node for node in graph.graph.nodes if node.target is torch.logsumexp]:
        with graph.graph.inserting_before(node):
            powers = graph.graph.call_function(torch.exp, (node.args[0],))
            total = graph.graph.call_function(torch.sum, (powers, node.args[1]))
            node.replace_all_uses_with(graph.graph.call_function(torch.log, (total,)))
        graph.graph.erase_node(node)
    graph.recompile()
    return graph.forward


def compiled() -> Loop:
    model = network()
    loss_fn = torch.compile(lambda b: torch.logsumexp(1000 * model(b["x"]), 1).mean(), backend=without_maximum)
    return Loop(causes.KERNEL, model, loss_fn, batches(), {})


IN_LOOPS = {found.__name__: found for found in (quantile, teacher, class_weights, sign, compiled)}
