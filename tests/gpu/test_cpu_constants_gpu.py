"""Loss functions that make constants on the CPU are captured, and train as eager steps do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from captured_faults import Loop, assert_same_history, make_net, train
from halfstep.fast import fast_path as fast
from halfstep.step.randomness import choose_algorithms

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")


@pytest.fixture(autouse=True)
def _start_afresh(monkeypatch: pytest.MonkeyPatch) -> Any:
    torch._dynamo.reset()
    monkeypatch.setattr(fast, "COMPARE_SHARE", float("inf"))
    with choose_algorithms(deterministic=True):
        yield


def weigh(x: Tensor) -> Tensor:
    return x * torch.tensor([1.0, 0.5, 2.0]).to(x.device)


def scale(x: Tensor) -> Tensor:
    return x * torch.tensor(0.3) / torch.tensor(0.7, dtype=torch.float64) + torch.tensor(1)


def look_up(x: Tensor) -> Tensor:
    places = torch.arange(3)[None] - torch.arange(3)[:, None]
    return x @ x.new_tensor([0.1, 0.2, 0.3, 0.4, 0.5])[places + 2]


def move_table(x: Tensor) -> Tensor:
    distances = (torch.arange(3.0)[None] - torch.arange(3.0)[:, None]).abs().log1p()
    return x @ distances.to(x.device, x.dtype)


def mask(x: Tensor) -> Tensor:
    kept = torch.zeros(x.shape, device=x.device)
    kept[:, 1:] = 2.0
    kept[0] = torch.tensor([1.0, 3.0, 0.5])
    return x * kept


CONSTANTS: list[Callable[[Tensor], Tensor]] = [weigh, scale, look_up, move_table, mask]


def make_loop(change: Callable[[Tensor], Tensor], dropout: float = 0.1) -> Callable[[torch.device], Loop]:
    def make(device: torch.device) -> Loop:
        model = nn.Sequential(make_net(device), nn.Dropout(dropout))
        return Loop(model, lambda batch: F.cross_entropy(change(model(batch[0])), batch[1]))

    return make


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("change", CONSTANTS)
def test_constants_are_captured(change: Callable[[Tensor], Tensor], precision: str) -> None:
    found = train(make_loop(change), CUDA, "graph", precision=precision)
    assert (found.step.mode, found.why_eager) == ("graph", "")
    assert_same_history(found, train(make_loop(change), CUDA, "off", precision=precision))


@pytest.mark.parametrize("change", CONSTANTS)
def test_constants_are_compiled(change: Callable[[Tensor], Tensor]) -> None:
    make = make_loop(change, dropout=0.0)  # compiled code draws different random numbers
    found, expected = (train(make, CUDA, fast, precision="bf16") for fast in ("compile", "off"))
    assert "compile" in found.step.mode, found.why_eager
    losses = [torch.tensor([one["loss"] for one in trained.history]) for trained in (found, expected)]
    torch.testing.assert_close(losses[0], losses[1], rtol=0.05, atol=0.0)


def test_random_numbers_of_the_cpu_are_no_constants() -> None:
    make = make_loop(lambda x: x * torch.rand(3).to(x.device))
    found = train(make, CUDA, "graph")
    assert found.step.mode == "eager"
    assert "aten.rand.default runs on the cpu" in found.why_eager
    assert_same_history(found, train(make, CUDA, "off"))
