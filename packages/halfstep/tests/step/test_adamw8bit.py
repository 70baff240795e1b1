"""AdamW with one-byte moments: close to AdamW, equal to torchao's, dropped whole on a bad step, stored exactly."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from halfstep.errors import ConfigError
from halfstep.step.optim.adamw8bit import AdamW8bit
from halfstep.step.optim.codes import encode_signed, encode_unsigned, make_signed_table, make_unsigned_table


def net(memory_format: torch.memory_format = torch.contiguous_format) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(16, 32, 3), nn.BatchNorm2d(32), nn.Conv2d(32, 8, 1))  # 4608, 32 and 256 values
    return model.to(memory_format=memory_format)  # type: ignore[call-overload, no-any-return]


def give_gradients(model: nn.Module, step: int) -> None:
    for k, parameter in enumerate(model.parameters()):
        generator = torch.Generator().manual_seed(1000 * step + k)
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter) * 0.1


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, start: int = 0) -> list[Tensor]:
    for step in range(start, start + steps):
        give_gradients(model, step)
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["nchw", "nhwc"])
def test_weights_follow_adamw_within_the_rounding_of_the_moments(layout: torch.memory_format) -> None:
    exact, small = net(layout), net(layout)
    options = {"lr": 1e-2, "weight_decay": 0.1}
    began = [p.detach().clone() for p in exact.parameters()]
    a = train(exact, torch.optim.AdamW(exact.parameters(), **options), 20)
    b = train(small, AdamW8bit(small.parameters(), **options), 20)
    for start, one, other in zip(began, a, b, strict=True):
        # A code is at most 1/14 off near a block's maximum; 20 steps of random sign average that out.
        assert (one - other).norm() < 0.05 * (one - start).norm()


def test_small_tensors_have_exact_moments() -> None:
    exact, small = net(), net()
    a = train(exact, torch.optim.AdamW(exact.parameters(), lr=1e-2, weight_decay=0.1), 5)
    b = train(small, AdamW8bit(small.parameters(), lr=1e-2, weight_decay=0.1), 5)
    for one, other in itertools.islice(zip(a, b, strict=True), 1, None):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_the_numbers_are_those_of_torchao() -> None:
    torchao = pytest.importorskip("torchao.optim", reason="torchao is not installed: NOT compared with it")
    ours, theirs = net(), net()
    a = train(ours, AdamW8bit(ours.parameters(), lr=1e-2, weight_decay=0.1), 5)
    b = train(theirs, torchao.AdamW8bit(theirs.parameters(), lr=1e-2, weight_decay=0.1), 5)
    for one, other in zip(a, b, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_moments_take_a_byte_a_value() -> None:
    model = nn.Linear(256, 256, bias=False)
    optimizer = AdamW8bit(model.parameters())
    train(model, optimizer, 1)
    held = sum(t.numel() * t.element_size() for t in optimizer.state[model.weight].values())
    assert 2 * 256**2 <= held < 2 * 256**2 * (1 + 4 / 256) + 4096


def test_a_tensor_learning_rate_is_read_at_every_step() -> None:
    model = net()
    rate = torch.tensor(0.0)
    optimizer = AdamW8bit(model.parameters(), lr=rate)
    before = [p.detach().clone() for p in model.parameters()]
    train(model, optimizer, 1)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    rate.fill_(0.1)
    train(model, optimizer, 1)
    assert not any(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_a_beta_of_one_is_refused() -> None:
    with pytest.raises(ConfigError, match="betas"):
        AdamW8bit(nn.Linear(2, 2).parameters(), betas=(1.0, 0.999))


# --- one-byte codes: the nearest of 256 values, computed without a search ---

TABLES = [(make_signed_table(), encode_signed), (make_unsigned_table(), encode_unsigned)]
Codes = Callable[[Tensor], Tensor]


@pytest.mark.parametrize(("table", "codes"), TABLES, ids=["signed", "unsigned"])
def test_codes_are_the_nearest_table_values(table: tuple[float, ...], codes: Codes) -> None:
    assert len(table) == 256
    entries = torch.tensor(table)
    evenly, tiny = torch.linspace(min(table), 1, 3001), torch.logspace(-8, 0, 3001)
    between = (entries[1:] + entries[:-1]) / 2
    values = torch.cat([evenly, tiny, -tiny[:-1] if min(table) < 0 else tiny, between * 0.9999, between * 1.0001])
    values = values[(values >= min(table)) & (values <= 1)]
    found = entries[codes(values).int()]
    best = (values[:, None] - entries[None]).abs().amin(dim=1)
    assert ((values - found).abs() <= best + 1e-6 * values.abs()).all()


def test_the_largest_of_a_block_may_be_off_by_a_rounding_on_either_side() -> None:
    above = torch.tensor([1 + 2.0**-23, 1 - 2.0**-24])
    assert encode_signed(above).tolist() == [255, 255]
    assert encode_signed(-above).tolist() == [0, 0]
    assert encode_unsigned(above).tolist() == [255, 255]
