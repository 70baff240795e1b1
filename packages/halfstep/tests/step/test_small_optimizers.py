"""Optimizers with less state: weights in bf16, of which every bit comes back, and one-byte moments."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from halfstep.errors import ConfigError
from halfstep.hardware.probe import probe
from halfstep.precision.decide import decide
from halfstep.step.optim.adamw8bit import AdamW8bit
from halfstep.step.optim.adamw_bf16 import AdamWBf16
from halfstep.step.optim.codes import encode_signed, encode_unsigned, make_signed_table, make_unsigned_table
from halfstep.step.optim.half_weights import join, make_key, round_stochastically, split
from halfstep.step.step import GuardedStep
from tiny_training import assert_same_bits, copy_tensors

KINDS = (AdamWBf16, AdamW8bit)
FUSED_ADAMW = partial(torch.optim.AdamW, fused=True)


def bits(values: Tensor) -> Tensor:
    return values.view(torch.int32)


HIGHS = torch.tensor(
    [0x0000, 0x0001, 0x007F, 0x0080, 0x3F80, 0x3F7F, 0x4049, 0x0100, 0x7F7E, 0x42FF, 0x2EDB, 0x7E80], dtype=torch.int16
)
"""Zero, subnormals, the edge of normal numbers, powers of two and their neighbours, the largest but one."""


def test_any_pair_of_halves_is_stored_as_it_was() -> None:
    """Every low half next to many high halves of both signs, then random pairs, also infinities and NaN: a bad step
    reads them and must not change them. So joining loses nothing, and every fp32 number comes back, too."""
    torch.manual_seed(0)
    lows = torch.arange(-32768, 32768).to(torch.int16)
    highs = torch.cat([HIGHS, HIGHS - 2**15]).repeat_interleave(len(lows))
    high, low = torch.cat([highs, draw_halves()]).view(torch.bfloat16), torch.cat([lows.repeat(24), draw_halves()])
    again = split(join(high, low))
    assert torch.equal(again[0].view(torch.int16), high.view(torch.int16))
    assert torch.equal(again[1], low)


def draw_halves() -> Tensor:
    return torch.randint(-32768, 32768, (100_000,)).to(torch.int16)


def test_the_bf16_part_is_a_casts_but_at_exact_ties() -> None:
    torch.manual_seed(0)
    limit = torch.tensor([0x7F7F7FFF, 0x7F7F8000], dtype=torch.int32).view(torch.float32)
    values = torch.cat([torch.randn(200_000), limit])
    high, low = split(values)
    assert (high.dtype, low.dtype) == (torch.bfloat16, torch.int16)
    assert high[-2:].isfinite().tolist() == [True, False], "the largest value whose bf16 is finite, and the next"
    is_tie = bits(values) & 0xFFFF == 0x8000
    differs = high != values.bfloat16()
    assert not (differs & ~is_tie).any()
    tie = torch.tensor([0x3F808000, 0x3F818000], dtype=torch.int32).view(torch.float32)
    assert split(tie)[0].view(torch.int16).tolist() == [0x3F81, 0x3F82], "up, also where even is below"


def test_random_rounding_is_right_on_average_and_the_same_for_the_same_key() -> None:
    value = 1.0 + 0.3 * 2**-7
    values = torch.full((100_000,), value)
    key = make_key(0, 3, torch.tensor(7.0))
    found = round_stochastically(values, key)
    assert set(found.unique().tolist()) == {1.0, 1.0 + 2**-7}
    up = (found.float() > 1).float().mean().item()
    assert up == pytest.approx(0.3, abs=4 * (0.21 / 100_000) ** 0.5), "four deviations"
    assert torch.equal(found, round_stochastically(values, key))
    assert not torch.equal(found, round_stochastically(values, make_key(0, 3, torch.tensor(8.0))))
    assert not torch.equal(found, round_stochastically(values, make_key(0, 4, torch.tensor(7.0))))
    assert not torch.equal(found, round_stochastically(values, make_key(1, 3, torch.tensor(7.0))))


def test_values_that_bf16_has_and_values_that_are_none_are_not_rounded() -> None:
    values = torch.tensor([0.0, -0.0, 1.0, -3.5, float("inf"), -float("inf")])
    assert torch.equal(round_stochastically(values, torch.tensor(5)).float(), values)
    assert round_stochastically(torch.tensor([float("nan")]), torch.tensor(5)).isnan().all()


# --- optimizers ---


def model_of(dtype: torch.dtype) -> nn.ParameterList:
    torch.manual_seed(0)
    shapes = ((64, 80), (17,), (8, 5, 3, 3))
    start = [torch.randn(shape).bfloat16() for shape in shapes]
    start[2] = start[2].to(memory_format=torch.channels_last)
    return nn.ParameterList([nn.Parameter(t.to(dtype)) for t in start])


def give(model: nn.Module, step: int, scale: float = 0.01) -> None:
    """Give the same gradients to every model: of a kind that bf16 holds."""
    generator = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        gradient = (torch.randn(parameter.shape, generator=generator) * scale).bfloat16()
        parameter.grad = torch.empty_like(parameter).copy_(gradient.to(parameter.dtype))


def master(optimizer: Any, parameter: Tensor) -> Tensor:
    low = optimizer.state[parameter]["low"]
    if low.ndim == 1 and parameter.ndim > 1:
        low = low.as_strided(parameter.shape, parameter.stride())
    return join(parameter.detach(), low)


@pytest.mark.parametrize(
    ("reference", "kind", "scale"),
    [(FUSED_ADAMW, AdamWBf16, None), (FUSED_ADAMW, AdamWBf16, 8.0), (AdamW8bit, AdamW8bit, None)],
)
def test_split_weights_update_as_fp32_weights_do_bit_for_bit(reference: Any, kind: Any, scale: float | None) -> None:
    exact, ours = model_of(torch.float32), model_of(torch.bfloat16)
    options: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.95), "weight_decay": 0.1}
    theirs, optimizer = reference(exact, **options), kind(ours, **options)
    for step in range(20):
        for model, stepping in ((exact, theirs), (ours, optimizer)):
            give(model, step)
            if scale is not None:
                stepping.grad_scale, stepping.found_inf = torch.tensor(scale), torch.tensor(0.0)
            stepping.step()
    for wanted, parameter in zip(exact, ours, strict=True):
        assert torch.equal(bits(master(optimizer, parameter)), bits(wanted.detach()))
        for name in {"exp_avg", "exp_avg_sq"} & theirs.state[wanted].keys():
            assert torch.equal(optimizer.state[parameter][name], theirs.state[wanted][name])
    assert any(not torch.equal(p.float(), w) for p, w in zip(ours, exact, strict=True)), "the low halves matter"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rounding", ["split", "stochastic", "nearest"])
def test_a_bad_step_changes_nothing(kind: Any, rounding: Any) -> None:
    model = model_of(torch.bfloat16)
    optimizer = kind(model, lr=1e-2, rounding=rounding)
    for step in range(2):
        give(model, step)
        optimizer.step()

    give(model, 9)
    model[0].grad.fill_(float("nan"))  # type: ignore[union-attr]
    before = copy_tensors(model, optimizer)
    optimizer.found_inf = torch.tensor(1.0)
    optimizer.step()
    assert_same_bits(before, copy_tensors(model, optimizer))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rounding", ["split", "stochastic"])
def test_small_updates_move_weights_that_rounding_to_nearest_leaves_where_they_are(kind: Any, rounding: Any) -> None:
    """Each of 80 updates is a sixteenth of the spacing."""
    moved = {}
    for how in (rounding, "nearest"):
        torch.manual_seed(0)
        model = nn.ParameterList([nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16))])
        optimizer = kind(model, lr=2**-12, weight_decay=0.0, rounding=how)
        for _ in range(80):
            model[0].grad = torch.ones_like(model[0])
            optimizer.step()
        moved[how] = 1 - model[0].float().mean().item()
    assert moved[rounding] == pytest.approx(80 * 2**-12, rel=0.05)
    assert moved["nearest"] == 0
    assert optimizer.compute_lost_share() == 1.0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rounding", ["split", "stochastic", "nearest"])
def test_a_stored_optimizer_goes_on_to_the_same_bits(kind: Any, rounding: Any) -> None:
    whole = model_of(torch.bfloat16)
    first = kind(whole, lr=1e-4, rounding=rounding, seed=5)
    train(whole, first, 3)
    other = model_of(torch.bfloat16)
    other.load_state_dict(whole.state_dict())
    second = kind(other, lr=1e-4, rounding=rounding, seed=5)
    second.load_state_dict(first.state_dict())
    train(whole, first, 5, start=3)
    train(other, second, 5, start=3)
    for one, same in zip(whole, other, strict=True):
        assert torch.equal(one.view(torch.int16), same.view(torch.int16))
        for name, value in first.state[one].items():
            assert torch.equal(value, second.state[same][name]), name
            assert value.dtype == second.state[same][name].dtype


@pytest.mark.parametrize("kind", KINDS)
def test_low_halves_are_dropped_where_a_run_rounds_otherwise_from_here_on(kind: Any) -> None:
    model = model_of(torch.bfloat16)
    first = kind(model, lr=1e-3)
    give(model, 0)
    first.step()
    second = kind(model, lr=1e-3, rounding="stochastic")
    second.load_state_dict(first.state_dict())
    assert not any("low" in own for own in second.state.values())


def test_a_state_without_low_halves_goes_on_rounded_to_nearest() -> None:
    old = model_of(torch.bfloat16)
    theirs = torch.optim.AdamW(old, lr=1e-3, fused=True)
    give(old, 0)
    theirs.step()
    new = model_of(torch.bfloat16)
    optimizer = AdamWBf16(new, lr=1e-3)
    optimizer.load_state_dict(theirs.state_dict())
    assert optimizer.rounding == "nearest"
    assert optimizer.was_stored_without_low
    give(new, 1)
    optimizer.step()
    assert optimizer.state[new[0]]["exp_avg"].dtype == torch.float32
    assert optimizer.compute_lost_share() is not None


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_several_micro_batches_add_up_in_fp32(kind: Any) -> None:
    """1 and 2**-12 four times: in bf16 the sum would be 1."""
    plan = decide("fp32", probe("cpu"))
    model = nn.Linear(2, 1, bias=False).bfloat16()
    step = GuardedStep(model, kind(model.parameters(), lr=0.0), plan, accumulate=5)
    shares = [1.0, *[2.0**-12] * 4]

    def loss(batch: dict[str, Tensor]) -> tuple[Tensor, float]:
        return (model.weight * batch["share"]).sum(), 1.0

    facts = step.compute(loss, [{"share": torch.tensor(share)} for share in shares])
    gradient = model.weight.grad
    assert gradient.dtype == torch.float32
    step.commit(facts)
    assert facts.read().grad_norm == pytest.approx(2**0.5 * sum(shares) / 5, rel=1e-6)
    step.commit(step.compute(loss, [{"share": torch.tensor(1.0)}]))
    assert model.weight.grad.dtype == torch.bfloat16, "alone they take two bytes"  # type: ignore[union-attr]


def test_fp32_weights_among_half_ones_are_planned_without_reading_addresses() -> None:
    """As the memory plan builds the optimizer's state: tensors without content have no address, and torch warns."""
    with FakeTensorMode():
        half, whole = (nn.Parameter(torch.empty(4, dtype=dtype)) for dtype in (torch.bfloat16, torch.float32))
        half.grad, whole.grad = torch.empty_like(half), torch.empty_like(whole)
        optimizer = AdamWBf16([half, whole], lr=1e-3)
        optimizer.step()
    assert {name for name, value in optimizer.state[whole].items() if value.shape} == {"exp_avg", "exp_avg_sq"}


# --- one-byte moments: close to AdamW, equal to torchao's ---


def net(memory_format: torch.memory_format = torch.contiguous_format) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(16, 32, 3), nn.BatchNorm2d(32), nn.Conv2d(32, 8, 1))  # 4608, 32 and 256 values
    return model.to(memory_format=memory_format)  # type: ignore[call-overload, no-any-return]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, start: int = 0) -> list[Tensor]:
    for step in range(start, start + steps):
        give(model, step, 0.1)
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
