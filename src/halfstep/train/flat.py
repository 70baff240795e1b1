"""Many tensors as a few flat ones, so that saving, restoring and averaging them takes a handful of kernels.

A skipped step must leave every tensor bit-identical. Multiplying by a flag cannot do that (0 * NaN is NaN, and
x + 0 loses -0.0), so everything here *selects* with `torch.where`. There is no `_foreach_where`; one `where` a
tensor would be hundreds of launches. Concatenating per dtype, selecting once and copying back is about four.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


def is_writable_in_place(tensor: Tensor) -> bool:
    """Dense and not overlapping: an expanded buffer shares memory between elements and is never written."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


def flat_view(tensor: Tensor) -> Tensor:
    """The tensor's memory as one dimension, in physical order (channels_last weights are not contiguous)."""
    if tensor.is_contiguous():
        return tensor.view(-1)
    return tensor.as_strided((tensor.numel(),), (1,))


def by_kind(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Groups of one device and one dtype, in order of first appearance."""
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return list(groups.values())


def gather(tensors: Sequence[Tensor]) -> Tensor:
    """One flat copy of tensors of one kind."""
    return torch.cat([flat_view(tensor) for tensor in tensors])


def scatter(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    """Write a flat copy back into the tensors it was gathered from."""
    pieces = flat.split([tensor.numel() for tensor in tensors])
    torch._foreach_copy_([flat_view(tensor) for tensor in tensors], list(pieces))


class Snapshot:
    """A copy of some tensors, put back where a device flag says so."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self.groups = by_kind(tensors)
        self.saved: list[Tensor] = []

    @property
    def num_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for group in self.groups for tensor in group)

    @torch.no_grad()
    def save(self) -> None:
        self.saved = [gather(group) for group in self.groups]

    @torch.no_grad()
    def became_non_finite(self, device: torch.device) -> Tensor:
        """Whether any number that was finite when saved is not now. Masks that hold -inf on purpose do not count."""
        found = torch.zeros((), dtype=torch.bool, device=device)
        for group, saved in zip(self.groups, self.saved, strict=True):
            if saved.is_floating_point():
                found = found | (torch.isfinite(saved) & ~torch.isfinite(gather(group))).any().to(device)
        return found

    @torch.no_grad()
    def restore_where(self, flag: Tensor) -> None:
        """Where `flag` is true every tensor gets its saved bits back; otherwise it keeps what it has now."""
        for group, saved in zip(self.groups, self.saved, strict=True):
            scatter(torch.where(flag, saved, gather(group)), group)
        self.saved = []
