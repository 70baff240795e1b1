"""SlotContrast's losses, both in fp32."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from halfstep.islands import fp32_island, to_fp32


def slot_contrast(slots: Tensor, *, temperature: float, across_batch: bool, is_real: Tensor | None = None) -> Tensor:
    """How well a slot (B, T, K, D) is told from all others by itself one frame later: cross-entropy.

    Others are all slots of the same frame, of all clips of the micro-batch with `across_batch`. As upstream, each slot
    of frame t + 1 asks which slot of frame t it is: the softmax runs over the earlier frame.
    """
    with fp32_island():
        logits = contrast_logits(slots, temperature=temperature, across_batch=across_batch)
        right = torch.log_softmax(logits, dim=-2).diagonal(dim1=-2, dim2=-1)
        if is_real is None:
            return -right.mean()
        counts = is_real[:, 1:].unsqueeze(-1).expand(-1, -1, slots.shape[2])  # a real frame follows real ones only
        weight = counts.transpose(0, 1).flatten(1) if across_batch else counts.flatten(0, 1)
        return -(right * weight).sum() / weight.sum().clamp(min=1)


def contrast_logits(slots: Tensor, *, temperature: float, across_batch: bool) -> Tensor:
    """Cosines of slots of consecutive frames over the temperature: (T - 1, B·K, B·K), or (B · (T - 1), K, K)."""
    slots = F.normalize(to_fp32(slots), dim=-1)
    frames = slots.transpose(0, 1).flatten(1, 2) if across_batch else slots
    if across_batch:
        return frames[:-1] @ frames[1:].transpose(1, 2) / temperature
    return (frames[:, :-1] @ frames[:, 1:].transpose(2, 3) / temperature).flatten(0, 1)
