"""The model's buffers across one step. BatchNorm writes its statistics during forward, before any verdict exists."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from halfstep.step.flat import Snapshot, became_non_finite, gather, is_writable_in_place


class Buffers:
    """Saved when a window starts, put back where the step turns out bad.

    Most modules write into their buffers; some replace the tensor instead, or make it when first used. The first kind
    is saved as bits. For the others the old tensor still has the old bits, and is selected or put back as it was.
    """

    def __init__(self, model: nn.Module) -> None:
        self.slots = [(module, name) for module in model.modules() for name in module._buffers]
        self.before: list[Tensor | None] = []
        self.snapshot = Snapshot(())

    def save(self) -> None:
        before = [module._buffers[name] for module, name in self.slots]
        snapshot = Snapshot(b for b in before if b is not None and is_writable_in_place(b))
        snapshot.save()
        self.before, self.snapshot = before, snapshot

    @torch.no_grad()
    def became_non_finite(self, device: torch.device) -> Tensor:
        """Whether forward left a statistic that is not finite where there was a finite one."""
        found = torch.zeros((), dtype=torch.bool, device=device)
        for group, saved in zip(self.snapshot.groups, self.snapshot.saved, strict=True):
            if saved.is_floating_point():
                found = found | became_non_finite(saved, gather(group)).to(device)
        for _, _, before, now in self._replaced():
            if now is not None and now.is_floating_point():
                fresh = torch.zeros((), device=now.device)
                found = found | became_non_finite(fresh if before is None else before, now).to(device)
        return found

    @torch.no_grad()
    def restore_where(self, bad: Tensor) -> None:
        self.snapshot.restore_where(bad)
        for module, name, before, now in self._replaced():
            if before is not None and now is not None and before.shape == now.shape and before.dtype == now.dtype:
                module._buffers[name] = torch.where(bad, before, now)
            elif bool(bad):  # made, dropped or resized: only the host can put that back
                module._buffers[name] = before

    @property
    def are_replaced(self) -> bool:
        """Whether the last window made new tensors instead of writing into the old ones."""
        return bool(self._replaced())

    def forget(self) -> None:
        """Drop the copies; a buffer that was replaced since they were made is put back as it was."""
        for module, name, before, _ in self._replaced():
            module._buffers[name] = before
        self.before, self.snapshot = [], Snapshot(())

    def _replaced(self) -> list[tuple[nn.Module, str, Tensor | None, Tensor | None]]:
        live = ((module, name, module._buffers[name]) for module, name in self.slots)
        pairs = zip(live, self.before, strict=False)
        return [(module, name, before, now) for (module, name, now), before in pairs if now is not before]
