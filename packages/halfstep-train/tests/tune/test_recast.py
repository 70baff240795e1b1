"""Half copies of weights that are cast again for backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from halfstep_train.tune import modes
from tiny_training import graph_is_held


def test_half_copies_of_weights_are_not_kept_from_forward_to_backward_and_gradients_have_the_same_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.SiLU(), nn.Conv2d(4, 2, 1, bias=False), nn.Flatten(), nn.Linear(72, 3))
    model.to(memory_format=torch.channels_last)
    x, kept, original = torch.randn(2, 3, 8, 8), [], modes._pack_copy

    def noted(tensor: Tensor) -> Any:
        kept.append(original(tensor))
        return kept[-1]

    def loss(batch: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(batch).float().square().sum()

    monkeypatch.setattr(modes, "_pack_copy", noted)
    with modes.cast_weights_again():
        found = torch.autograd.grad(loss(x), list(model.parameters()))
    assert torch.is_autocast_cache_enabled()
    expected = torch.autograd.grad(loss(x), list(model.parameters()))
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    sources = [one[0] for one in kept if isinstance(one, tuple)]
    assert [id(one) for one in sources] == [id(model[place].weight) for place in (0, 2, 4)]


def test_a_forward_without_a_backward_is_let_go_of() -> None:
    layer = nn.Linear(4, 4)

    def forward() -> Tensor:
        with modes.cast_weights_again(), torch.autocast("cpu", torch.bfloat16):
            return layer(torch.ones(2, 4)).float().exp()

    assert not graph_is_held(layer.weight, forward)
