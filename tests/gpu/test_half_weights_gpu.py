"""Weights in bf16 on a real GPU: our kernel against torch's fp32 AdamW and against its twin, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from halfstep.step.optim.adamw8bit import AdamW8bit
from halfstep.step.optim.adamw_bf16 import LOW, AdamWBf16
from halfstep.step.optim.half_weights import join
from halfstep.step.optim.single_pass import SinglePass, can_run_single_pass

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda", 0)
SHAPES = ((1000, 777), (64, 32, 3, 3), (4096,), (5,))
OPTIONS: dict[str, Any] = {"betas": (0.9, 0.95), "weight_decay": 0.1}
GOOD = torch.zeros((), dtype=torch.bool)


def parameters(dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator(CUDA).manual_seed(0)
    values = [torch.randn(shape, device=CUDA, generator=generator).bfloat16() for shape in SHAPES]
    values[1] = values[1].contiguous(memory_format=torch.channels_last)
    return [nn.Parameter(value.to(dtype)) for value in values]


def give(model: list[Tensor], seed: int, dtype: torch.dtype | None = None) -> None:
    """The same for all models, and of a kind that bf16 holds."""
    generator = torch.Generator(CUDA).manual_seed(seed)
    for parameter in model:
        value = torch.randn(parameter.shape, device=CUDA, generator=generator) * 10.0 ** (seed % 5 - 3)
        kind = dtype or parameter.dtype
        if parameter.dtype != kind:
            parameter.grad_dtype = kind
        if parameter.grad is None or parameter.grad.dtype != kind:
            parameter.grad = torch.empty_like(parameter, dtype=kind)
        parameter.grad.copy_(value.bfloat16())


def bits(value: Tensor) -> Tensor:
    return value.detach().clone().view(torch.int32 if value.dtype == torch.float32 else torch.int16)


def masters(model: list[Tensor], optimizer: Any) -> list[Tensor]:
    found = []
    for parameter in model:
        low = optimizer.state[parameter][LOW]
        low = low if low.shape == parameter.shape else low.as_strided(parameter.shape, parameter.stride())
        found.append(join(parameter.detach(), low))
    return found


@pytest.mark.parametrize("factor", [None, 0.37])
@pytest.mark.parametrize("gradient", [torch.bfloat16, torch.float32])
def test_split_weights_in_one_pass_have_the_bits_of_torchs_fp32_adamw(
    factor: float | None, gradient: torch.dtype
) -> None:
    exact, ours = parameters(torch.float32), parameters(torch.bfloat16)
    theirs = torch.optim.AdamW(exact, lr=torch.full((), 3e-3, device=CUDA), fused=True, **OPTIONS)
    optimizer = AdamWBf16(ours, lr=torch.full((), 3e-3, device=CUDA), **OPTIONS)
    for model, stepping in ((exact, theirs), (ours, optimizer)):
        give(model, 0, gradient if model is ours else None)
        stepping.step()
    assert can_run_single_pass(optimizer, CUDA)
    single_pass = SinglePass(optimizer, CUDA)
    assert single_pass.fits_gradients
    scale = None if factor is None else torch.full((), factor, device=CUDA)
    single_pass.record(GOOD.to(CUDA), scale)
    single_pass.fill()
    for step in range(1, 30):
        give(exact, step)
        give(ours, step, gradient)
        if scale is not None:
            theirs.grad_scale, theirs.found_inf = scale.reciprocal(), torch.zeros((), device=CUDA)  # type: ignore[attr-defined]
        theirs.step()
        for group in single_pass.groups:
            group.run(GOOD.to(CUDA), scale)
    for wanted, found in zip(exact, masters(ours, optimizer), strict=True):
        assert torch.equal(bits(found), bits(wanted))


@pytest.mark.parametrize("rounding", ["split", "stochastic"])
def test_one_pass_and_eager_steps_store_the_same_bits(rounding: Any) -> None:
    """A run may mix them: a resumed step is eager before it is captured."""
    models = [parameters(torch.bfloat16) for _ in range(2)]
    optimizers = [AdamWBf16(model, lr=1e-3, rounding=rounding, seed=7, **OPTIONS) for model in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        give(model, 0)
        optimizer.step()
    single_pass = SinglePass(optimizers[0], CUDA)
    assert single_pass.fits_gradients
    single_pass.record(GOOD.to(CUDA), None)
    single_pass.fill()
    for step in range(1, 10):
        for model in models:
            give(model, step)
        for group in single_pass.groups:
            group.run(GOOD.to(CUDA), None)
        optimizers[1].step()
    for one, other in zip(*models, strict=True):
        assert torch.equal(bits(one), bits(other))
        for name, value in optimizers[0].state[one].items():
            assert torch.equal(value, optimizers[1].state[other][name]), name


@pytest.mark.parametrize("rounding", ["split", "stochastic"])
def test_8_bit_moments_by_the_kernel_have_the_bits_of_the_twin(rounding: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    models = [parameters(torch.bfloat16) for _ in range(2)]
    optimizers = [AdamW8bit(model, lr=1e-3, rounding=rounding, seed=7) for model in models]
    monkeypatch.setattr(optimizers[1], "_has_kernel", lambda parameter: False)
    for step in range(6):
        for model, optimizer in zip(models, optimizers, strict=True):
            give(model, step)
            optimizer.step()
    for one, other in zip(*models, strict=True):
        assert torch.equal(bits(one), bits(other))
        for name, value in optimizers[0].state[one].items():
            assert torch.equal(value, optimizers[1].state[other][name]), name
