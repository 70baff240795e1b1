from __future__ import annotations

import torch
from torch import nn

from halfstep_train.kernels.chain import cast_together


def test_weights_are_cast_as_one_by_one_and_so_are_their_gradients() -> None:
    torch.manual_seed(0)
    weights = [nn.Parameter(torch.randn(shape)) for shape in [(4, 3, 3, 3), (5, 4, 1, 1), (2, 5, 3, 3)]]
    weights[0].data = weights[0].data.to(memory_format=torch.channels_last)
    cast = cast_together(weights, torch.bfloat16)
    assert all(torch.equal(ours, weight.bfloat16()) for ours, weight in zip(cast, weights, strict=True))
    assert [ours.stride() for ours in cast] == [weight.stride() for weight in weights]
    (cast[0].square().sum() + cast[2].sum()).backward()
    assert torch.equal(weights[0].grad, (2 * weights[0].detach().bfloat16()).float())
    assert weights[1].grad is None
    assert torch.equal(weights[2].grad, torch.ones_like(weights[2]))


def test_a_frozen_weight_stays_frozen() -> None:
    weights = [nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2, 2), requires_grad=False)]
    trained, frozen = cast_together(weights, torch.bfloat16)
    assert trained.requires_grad
    assert not frozen.requires_grad
    (trained + frozen).sum().backward()
    assert weights[0].grad is not None
    assert weights[1].grad is None


def test_what_has_the_dtype_already_is_left_alone() -> None:
    weights = [nn.Parameter(torch.ones(2, 2))]
    assert cast_together(weights, torch.float32) is weights
