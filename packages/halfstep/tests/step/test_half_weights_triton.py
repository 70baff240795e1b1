"""Kernels of one-byte moments and of bf16 weights against their twins in torch, bit for bit; interpreted here, compiled
in tests/gpu."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from halfstep.step.optim.adamw8bit import make_state, update
from halfstep.step.optim.adamw_bf16 import LOW, AdamWBf16, Setting
from halfstep.step.optim.half_weights import join, make_key, round_stochastically, split
from halfstep.step.optim.single_pass import SinglePass
from tiny_training import assert_same_bits

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu has it, compiled"),
]

CPU = torch.device("cpu")
GOOD, BAD = torch.tensor(False), torch.tensor(True)


def setting(scale: float | None = None, *, bad: bool = False) -> Setting:
    given = None if scale is None else torch.tensor(scale)
    return Setting(torch.tensor(1e-3), torch.tensor(float(bad)), given, (0.9, 0.999), 1e-8, 0.1)


def corrections(step: int) -> Sequence[Tensor]:
    return [1 - torch.tensor(beta) ** torch.tensor(float(step)) for beta in (0.9, 0.999)]


def spread_gradient(step: int, count: int, dtype: torch.dtype) -> Tensor:
    """Return blocks of very different size, of which one is zero."""
    generator = torch.Generator().manual_seed(step)
    blocks = torch.randn(count // 256, 256, generator=generator) * torch.logspace(-9, 3, count // 256)[:, None]
    blocks[1] = 0
    return blocks.flatten().to(dtype)


@pytest.mark.parametrize(
    ("dtype", "how", "scale"),
    [
        (torch.float32, "", None),
        (torch.float16, "", 3.0),
        (torch.bfloat16, "split", None),
        (torch.bfloat16, "stochastic", 3.0),
    ],
)
def test_8_bit_moments_have_the_bits_of_the_twin(dtype: torch.dtype, how: str, scale: float | None) -> None:
    from halfstep.step.optim import adamw8bit_triton

    torch.manual_seed(0)
    count = 19 * 256  # not a whole number of programs
    start = torch.randn(count).to(dtype)
    ours = {"weights": start.clone(), **make_state(start)}
    if how == "split":
        ours[LOW] = torch.randint(-32768, 32768, (count,)).to(torch.int16)
    theirs = {name: value.clone() for name, value in ours.items()}
    for step in range(1, 5):
        gradient = spread_gradient(step, count, dtype) * (float("nan") if step == 3 else 1)
        key = make_key(0, 2, torch.tensor(float(step)))
        given = setting(scale, bad=step == 3)
        adamw8bit_triton.update(
            ours["weights"], gradient.clone(), ours, corrections(step), given, key if how == "stochastic" else None
        )
        theta = join(theirs["weights"], theirs[LOW]) if how == "split" else theirs["weights"]
        theta = theta.float() if how == "stochastic" else theta
        update(theta, gradient.clone(), theirs, corrections(step), given)
        if how == "split":
            theirs["weights"], theirs[LOW] = split(theta)
        else:
            theirs["weights"] = round_stochastically(theta, key) if how else theta
    assert not torch.equal(ours["weights"], start)
    assert_same_bits(ours, theirs)


def trained_by_torch(rounding: Any) -> tuple[nn.ParameterList, AdamWBf16]:
    torch.manual_seed(0)
    start = [torch.randn(67, 71), torch.randn(6, 5, 3, 3).to(memory_format=torch.channels_last), torch.randn(40)]
    model = nn.ParameterList([nn.Parameter(t.bfloat16()) for t in start])
    optimizer = AdamWBf16(model, lr=1e-2, weight_decay=0.1, rounding=rounding, seed=3)
    for step in range(2):
        give(model, step)
        optimizer.step()
    return model, optimizer


def give(model: nn.ParameterList, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in model:
        if parameter.grad is None:
            parameter.grad = torch.empty_like(parameter)
        parameter.grad.copy_(torch.randn(parameter.shape, generator=generator))


@pytest.mark.parametrize("rounding", ["split", "stochastic"])
def test_one_pass_of_our_kernel_stores_what_torchs_and_the_twin_store(rounding: Any) -> None:
    """A few roundings of fp32 apart: the interpreter fuses no multiply-adds. On a GPU the bits are the same."""
    (ours, passed), (theirs, stepped) = trained_by_torch(rounding), trained_by_torch(rounding)
    single_pass = SinglePass(passed, CPU)
    give(ours, 5)
    assert single_pass.fits_gradients
    single_pass.record(GOOD, None)
    single_pass.fill()
    for step in range(5, 8):
        give(ours, step)
        give(theirs, step)
        for group in single_pass.groups:
            group.run(GOOD, None)
        stepped.step()
    for one, other in zip(ours, theirs, strict=True):
        if rounding == "split":
            exact = [join(p.detach(), o.state[p][LOW]) for p, o in ((one, passed), (other, stepped))]
            torch.testing.assert_close(exact[0], exact[1], rtol=1e-5, atol=1e-6)
        else:
            same = (one == other).float().mean()
            assert same > 0.99, "the same draws: another one only where a last bit of fp32 differs"
        assert passed.state[one]["step"] == stepped.state[other]["step"]
    before = [p.detach().clone() for p in ours]
    for group in single_pass.groups:
        group.run(BAD, None)
    assert all(torch.equal(one, other) for one, other in zip(before, ours, strict=True))
