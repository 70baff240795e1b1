"""The model's buffers across one step. BatchNorm writes its statistics during forward, before any verdict exists."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from halfstep.train.flat import Snapshot, is_writable_in_place


class Buffers:
    """Saved when a window starts, put back where the step turns out bad."""

    def __init__(self, model: nn.Module) -> None:
        self.slots = [(module, name) for module in model.modules() for name in module._buffers]
        self.before: list[Tensor | None] = []
        self.snapshot = Snapshot(())

    def save(self) -> None:
        self.before = [module._buffers[name] for module, name in self.slots]
        # An expanded buffer shares memory between elements: nothing can write into it.
        self.snapshot = Snapshot(b for b in self.before if b is not None and is_writable_in_place(b))
        self.snapshot.save()

    @torch.no_grad()
    def restore_where(self, bad: Tensor) -> None:
        self.snapshot.restore_where(bad)
        for (module, name), before in zip(self.slots, self.before, strict=True):
            now = module._buffers[name]
            if now is not before and now is not None and before is not None:
                # The module replaced its tensor instead of writing into it; the old one still has the old bits.
                module._buffers[name] = torch.where(bad, before, now)
