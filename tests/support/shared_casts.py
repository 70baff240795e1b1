"""Loss functions that use a weight several times: eager autocast casts it once, and so must captured steps."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import captured_faults
import halfstep as hs
from captured_faults import ROWS, Loop

NUM_STEPS = 9


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.conv = nn.Conv1d(1, 1, 3, padding=1)
        self.cell = nn.Linear(12, 8)
        self.embed = nn.Embedding(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.second(torch.tanh(self.first(x)))
        return self.head(torch.tanh(hidden))  # type: ignore[no-any-return]


def twice(model: Net, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y) + F.cross_entropy(model(x * 0.5), y)


def convolution(model: Net, x: Tensor, y: Tensor) -> Tensor:
    image = x[:, None]
    for _ in range(3):
        image = model.conv(image)
    return F.cross_entropy(model(image[:, 0]), y)


def tied_weights(model: Net, x: Tensor, y: Tensor) -> Tensor:
    """One matrix is an embedding, read in fp32, and a head, in half precision."""
    hidden = torch.tanh(model.embed(y) + model.first(x))
    logits = F.linear(hidden, model.embed.weight), F.linear(model.second(hidden), model.embed.weight)
    return F.cross_entropy(logits[0], y) + F.cross_entropy(logits[1], y)


def recurrent_cell(model: Net, x: Tensor, y: Tensor) -> Tensor:
    hidden = torch.zeros(ROWS, 8, device=x.device)
    for number in range(5):
        hidden = torch.tanh(model.cell(torch.cat([x + number, hidden], 1)))
    return F.cross_entropy(model.head(hidden), y)


def several_regions(model: Net, x: Tensor, y: Tensor) -> Tensor:
    """Backward of the part in fp32 must run in fp32."""
    loss = twice(model, x, y)
    with hs.fp32_island():
        loss = loss + F.cross_entropy(model(x), y)
    with torch.autocast(x.device.type, dtype=torch.bfloat16):
        return loss + F.cross_entropy(model(x * 2), y)


def without_gradients_first(model: Net, x: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        target = model(x)
    return twice(model, x, y) + F.mse_loss(model(x + 1), target)


def cast_by_hand(model: Net, x: Tensor, y: Tensor) -> Tensor:
    """A cast that is not autocast's has its own gradient."""
    hidden = x @ model.first.weight.to(torch.bfloat16).T + x @ model.first.weight.to(torch.bfloat16).T
    return twice(model, x, y) + hidden.float().pow(2).mean()


def checkpointed(model: Net, x: Tensor, y: Tensor) -> Tensor:
    logits = [checkpoint(model, x * number, use_reentrant=False) for number in (1, 2)]
    return F.cross_entropy(logits[0], y) + F.cross_entropy(logits[1], y) + F.cross_entropy(model(x * 3), y)  # type: ignore[arg-type]


CASES: dict[str, Callable[[Net, Tensor, Tensor], Tensor]] = {
    function.__name__: function
    for function in (
        twice, convolution, tied_weights, recurrent_cell, several_regions, without_gradients_first,
        cast_by_hand, checkpointed,
    )
}  # fmt: skip


def assert_same(name: str, device: torch.device, precision: str = "bf16") -> None:
    def make(device: torch.device) -> Loop:
        model = Net().to(device)
        optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, fused=True)
        return Loop(model, lambda batch: CASES[name](model, *batch), optimizer=optimizer)

    found = captured_faults.assert_same(name, device, loops={name: make}, length=NUM_STEPS, precision=precision)
    assert found.step.plan.granted == precision
    assert "the eager step and" in str(found.step.certificate)  # not "up to rounding"
