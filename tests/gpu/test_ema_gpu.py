"""The average on a GPU: our kernel as torch.lerp, eager and in a graph alike."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from halfstep.step.ema import Ema

pytestmark = pytest.mark.gpu


def moved(model: nn.Module, ema: Ema, steps: int) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    for step in range(1, steps + 1):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape, device="cuda", generator=generator))
        ema.update(torch.tensor(step, device="cuda"), torch.tensor(step % 3 == 0, device="cuda"))


def test_the_kernel_averages_as_lerp_does_and_leaves_bad_steps_alone() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 65, 3), nn.BatchNorm2d(65), nn.Conv2d(65, 3, 3), nn.Conv2d(3, 64, 1)).cuda()
    model = model.to(memory_format=torch.channels_last)
    ema = Ema(model, decay=0.9)
    expected = {name: value.detach().clone() for name, value in model.named_parameters()}
    generator = torch.Generator("cuda").manual_seed(0)
    own = {name: value.detach().clone() for name, value in model.named_parameters()}
    moved(model, ema, 10)
    for step in range(1, 11):
        keep = torch.tensor(min(0.9, 1 - step ** (-2 / 3)), device="cuda")
        for name, value in own.items():
            value.add_(torch.randn(value.shape, device="cuda", generator=generator))
            if step % 3:
                expected[name] = torch.lerp(value, expected[name], keep)
    assert ema._pass.launches, "the kernel ran"
    state = ema.state_dict()
    for name, value in expected.items():
        torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-6)


def test_a_captured_update_has_the_bits_of_an_eager_one() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(333, 77), nn.Linear(77, 1024)).cuda()
    eager, captured = Ema(model), Ema(model)
    step, good = torch.tensor(3, device="cuda"), torch.tensor(False, device="cuda")
    for average in (eager, captured):
        average.update(step, good)
    with torch.no_grad():
        model[0].weight.mul_(1.5)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured.update(step, good)
    graph.replay()
    eager.update(step, good)
    found, expected = captured.state_dict(), eager.state_dict()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
