"""Buffers that `state_dict` leaves out (`persistent=False`): they steer training, so a run keeps them all the same."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from halfstep.step.flat import is_writable_in_place


def loose_buffers(model: nn.Module) -> dict[str, Tensor]:
    """By name, as they are now."""
    stored = model.state_dict().keys()
    return {name: buffer for name, buffer in model.named_buffers() if name not in stored}


@torch.no_grad()
def put_back(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Write into the buffers that are there; a cache that has grown since, or is not there yet, is replaced."""
    present = dict(model.named_buffers())
    device = next(model.parameters()).device
    for name, value in values.items():
        own = present.get(name)
        if own is not None and own.shape == value.shape and is_writable_in_place(own):
            own.copy_(value)
        else:
            place, _, leaf = name.rpartition(".")
            model.get_submodule(place).register_buffer(leaf, value.to(device, copy=True), persistent=False)
