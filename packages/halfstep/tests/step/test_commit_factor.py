"""Gradients scaled by the optimizer as it reads them: a rounding away from scaling them first, and just as safe."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from halfstep.step.commit import Committer, commit_all
from halfstep.step.optim.adamw8bit import AdamW8bit
from tiny_training import assert_same_bits, copy_tensors

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True, fused=True),
    "plain sgd": lambda p: torch.optim.SGD(p, lr=1e-2, fused=True),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2, fused=True),
    "adamw 8bit": lambda p: AdamW8bit(p, lr=1e-2),
    "selected": lambda p: torch.optim.RMSprop(p, lr=1e-2),
}
IN_KERNEL = [name for name in OPTIMIZERS if name != "selected"]
GOOD, BAD = torch.tensor(False), torch.tensor(True)
SPACING = 2.0**-23


def made(name: str, layout: torch.memory_format = torch.contiguous_format) -> tuple[nn.Module, Committer]:
    torch.manual_seed(0)
    model = nn.Conv2d(16, 32, 3).to(memory_format=layout)  # type: ignore[call-overload]
    return model, Committer(OPTIMIZERS[name](model.parameters()), None)


def give(model: nn.Module, seed: int) -> None:
    for k, parameter in enumerate(model.parameters()):
        generator = torch.Generator().manual_seed(10 * seed + k)
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def scaled(model: nn.Module, factor: Tensor) -> None:
    torch._foreach_mul_([p.grad for p in model.parameters() if p.grad is not None], factor)


def both(name: str, factors: Iterable[float], **more: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Everything after steps that scale by the optimizer, and after those that scale the gradients first."""
    (folded, in_kernel), (model, plain) = made(name, **more), made(name, **more)
    for seed, value in enumerate(factors):
        give(folded, seed)
        give(model, seed)
        commit_all([in_kernel], GOOD, torch.tensor(value))
        scaled(model, torch.tensor(value))
        commit_all([plain], GOOD, None)
    return copy_tensors(folded, in_kernel.optimizer), copy_tensors(model, plain.optimizer)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["nchw", "nhwc"])
@pytest.mark.parametrize("name", IN_KERNEL)
def test_a_factor_that_rounds_nothing_changes_no_bit(name: str, layout: torch.memory_format) -> None:
    """1 where nothing is clipped, a power of two where fp16 is unscaled."""
    assert_same_bits(*both(name, [1.0, 2.0**-16, 1.0, 0.5], layout=layout))


@pytest.mark.parametrize("name", IN_KERNEL)
def test_the_gradient_is_written_back_within_one_spacing(name: str) -> None:
    folded, plain = both(name, [0.3, 0.7, 0.1])
    for key in (key for key in plain if key.endswith(".grad")):
        assert ((folded[key] - plain[key]).abs() <= SPACING * plain[key].abs()).all()


@pytest.mark.parametrize("name", [name for name in IN_KERNEL if name != "adamw 8bit"])
def test_weights_are_a_few_roundings_away_where_gradients_are_clipped(name: str) -> None:
    folded, plain = both(name, [0.3, 0.7, 0.1])
    for key in ("weight", "bias"):
        # Each of three steps moves a weight below 1 by at most 0.05, its own rounding is a spacing of 1.
        assert (folded[key] - plain[key]).abs().max() <= 3 * SPACING


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_first_commit_is_the_very_multiplication(name: str) -> None:
    assert_same_bits(*both(name, [0.3]))


@pytest.mark.parametrize("name", IN_KERNEL)
def test_a_bad_step_with_a_factor_that_is_not_a_number_changes_nothing(name: str) -> None:
    model, committer = made(name)
    assert committer.method == "found_inf"
    for seed in range(2):
        give(model, seed)
        commit_all([committer], GOOD, torch.tensor(0.3))
    before = copy_tensors(model, committer.optimizer)
    commit_all([committer], BAD, torch.tensor(float("nan")))
    assert_same_bits(before, copy_tensors(model, committer.optimizer))
    assert not {"found_inf", "grad_scale"} & vars(committer.optimizer).keys()
