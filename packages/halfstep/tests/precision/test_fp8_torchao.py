"""torchao's fp8 layer as a part of a model, emulated on the CPU: names, copies, and the numbers of our simulation."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest
import torch
from torch import nn

from fake_driver import FakeDriver
from halfstep.hardware.device_facts import Hardware
from halfstep.hardware.fp8_layers import Fp8Gain, LayerShape, measure_gains_once
from halfstep.hardware.probe import probe

pytest.importorskip("torchao.float8", reason="torchao is not installed: NOT tested against it")

from halfstep.precision.fp8 import InFp8, InTorchaoFp8, read_torchao_settings  # noqa: E402
from halfstep.precision.swapped import swap_class, undo_swaps  # noqa: E402


def swapped() -> nn.Sequential:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(32, 48), nn.Linear(48, 16, bias=False))
    for layer in net:
        swap_class(layer, InTorchaoFp8, **read_torchao_settings(emulate=True))
    return net


def test_names_and_parameters_stay_and_the_swap_can_be_undone() -> None:
    net = swapped()
    assert list(net.state_dict()) == ["0.weight", "0.bias", "1.weight"]
    assert all(type(p) is nn.Parameter and p.dtype == torch.float32 for p in net.parameters())
    undo_swaps(net)
    assert type(net[0]) is nn.Linear


@pytest.mark.parametrize("tokens", [(16,), (2, 7), (37,)])
def test_simulation_gives_the_numbers_of_torchao(tokens: tuple[int, ...]) -> None:
    results = []
    for is_ours in (False, True):
        net = swapped()
        if is_ours:
            undo_swaps(net)
            for layer in net:
                swap_class(layer, InFp8)
        x = torch.linspace(-2, 3, 32 * torch.Size(tokens).numel()).reshape(*tokens, 32).sin().requires_grad_()
        output = net(x)
        assert output.dtype == torch.bfloat16
        assert output.shape == (*tokens, 16)
        output.float().square().sum().backward()
        results.append([output.detach().float(), x.grad, *(p.grad for p in net.parameters())])
    for theirs, ours in zip(*results, strict=True):
        assert theirs.dtype == torch.float32
        # Sums are rounded to bf16 in another order: a few 2^-9, well below fp8's own 2^-4.
        assert (theirs - ours).norm() / ours.norm() < 0.01


def test_a_copy_and_a_pickle_compute_the_same() -> None:
    net, x = swapped(), torch.randn(16, 32)
    for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert torch.equal(net(x), other(x))


def test_the_layer_compiles_without_graph_breaks() -> None:
    net, x = swapped(), torch.randn(16, 32)
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
    compiled(x).float().sum().backward()
    expected = swapped()
    expected(x).float().sum().backward()
    for a, b in zip(net.parameters(), expected.parameters(), strict=True):
        assert (a.grad - b.grad).norm() / b.grad.norm() < 0.01


# --- gains: measured once a shape, kept on disk, timed on real layers ---

pytest.importorskip("torchao.float8", reason="torchao is not installed: NOT tested against it")

SMALL, LARGE = LayerShape(16, 32, 48), LayerShape(64, 32, 48)


def hardware() -> Hardware:
    return probe("cpu", driver=FakeDriver())


def test_each_shape_is_measured_once(tmp_path: Path) -> None:
    asked: list[tuple[int, ...]] = []

    def measure(in_features: int, out_features: int, tokens: int, _device: str, _recipe: str) -> Fp8Gain:
        asked.append((in_features, out_features, tokens))
        return Fp8Gain(fp8_ms=1.0, bf16_ms=float(in_features))

    first = measure_gains_once([SMALL, SMALL], hardware(), tmp_path, measure=measure)
    both = measure_gains_once([SMALL, LARGE], hardware(), tmp_path, measure=measure)
    assert asked == [SMALL, LARGE]
    assert both[SMALL] == first[SMALL]
    assert both[LARGE].ratio == 64


def test_a_broken_file_is_measured_again(tmp_path: Path) -> None:
    def measure(*_shape: object) -> Fp8Gain:
        return Fp8Gain(fp8_ms=1.0, bf16_ms=2.0)

    measure_gains_once([SMALL], hardware(), tmp_path, measure=measure)
    (path,) = tmp_path.glob("fp8-tensorwise-torchao-*.json")
    path.write_text("{")
    assert measure_gains_once([SMALL], hardware(), tmp_path, measure=measure)[SMALL].ratio == 2
