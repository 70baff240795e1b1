"""LSTM, GRU and RNN layers are captured with cuDNN's kernels, and train as eager steps do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from captured_faults import Loop, assert_same_history, train
from halfstep.fast import fast_path as fast
from halfstep.step.randomness import choose_algorithms

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:.*autocast runs recurrent layers in fp16")]
CUDA = torch.device("cuda")
LAYERS: dict[str, Callable[[], nn.RNNBase]] = {
    "lstm": lambda: nn.LSTM(4, 16, 2, batch_first=True, bidirectional=True),
    "gru": lambda: nn.GRU(4, 16, 2),
    "rnn_relu": lambda: nn.RNN(4, 16, nonlinearity="relu", bias=False),
    "rnn_tanh": lambda: nn.RNN(4, 16, 3, bidirectional=True),
    "projected": lambda: nn.LSTM(4, 16, 2, proj_size=8),
    "one layer": lambda: nn.LSTM(4, 16, batch_first=True),
}


@pytest.fixture(autouse=True)
def _start_afresh(monkeypatch: pytest.MonkeyPatch) -> Any:
    torch._dynamo.reset()
    monkeypatch.setattr(fast, "COMPARE_SHARE", float("inf"))
    with choose_algorithms(deterministic=True):
        yield


def make_loop(name: str) -> Callable[[torch.device], Loop]:
    def make(device: torch.device) -> Loop:
        torch.manual_seed(0)
        layers = LAYERS[name]()
        size = (layers.proj_size or layers.hidden_size) * (1 + layers.bidirectional)
        model = nn.ModuleDict({"layers": layers, "head": nn.Linear(size, 3)}).to(device)

        def loss_fn(batch: Any) -> Tensor:
            x = torch.stack([batch[0], batch[0].cos(), batch[0].sin()], 1 if layers.batch_first else 0)
            return F.cross_entropy(model["head"](model["layers"](x)[0].select(int(layers.batch_first), -1)), batch[1])

        return Loop(model, loss_fn)

    return make


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", LAYERS)
def test_recurrent_layers_are_captured_and_train_as_eagerly(name: str, precision: str) -> None:
    found = train(make_loop(name), CUDA, "graph", precision=precision)
    assert (found.step.mode, found.why_eager) == ("graph", "")
    assert_same_history(found, train(make_loop(name), CUDA, "off", precision=precision))


def test_recurrent_layers_are_called_by_compiled_code() -> None:
    found, expected = (train(make_loop("lstm"), CUDA, fast, precision="bf16") for fast in ("compile", "off"))
    assert "compile" in found.step.mode, found.why_eager
    losses = [torch.tensor([one["loss"] for one in trained.history]) for trained in (found, expected)]
    torch.testing.assert_close(losses[0], losses[1], rtol=0.05, atol=0.0)


def test_a_hidden_state_is_carried_from_batch_to_batch() -> None:
    def make(device: torch.device) -> Loop:
        torch.manual_seed(0)
        model = nn.ModuleDict({"layers": nn.GRU(4, 16), "head": nn.Linear(16, 3)}).to(device)
        model.register_buffer("state", torch.zeros(1, 16, device=device))

        def loss_fn(batch: Any) -> Tensor:
            output, state = model["layers"](batch[0], model.state.clone())
            model.state.copy_(state.detach())
            return F.cross_entropy(model["head"](output), batch[1])

        return Loop(model, loss_fn)

    found = train(make, CUDA, "graph", precision="fp32")
    assert (found.step.mode, found.why_eager) == ("graph", "")
    assert_same_history(found, train(make, CUDA, "off", precision="fp32"))


def test_dropout_between_layers_stays_eager() -> None:
    def make(device: torch.device) -> Loop:
        model = nn.ModuleDict({"layers": nn.LSTM(4, 16, 2, dropout=0.5), "head": nn.Linear(16, 3)}).to(device)
        return Loop(model, lambda batch: F.cross_entropy(model["head"](model["layers"](batch[0])[0]), batch[1]))

    found = train(make, CUDA, "graph", precision="fp32")
    assert found.step.mode == "eager"
    assert "dropout between layers" in found.why_eager
