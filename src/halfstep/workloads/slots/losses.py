"""SlotContrast's losses, both in fp32."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from halfstep.islands import fp32_island, to_fp32
from halfstep.workloads.over_ranks import all_rows, total


def slot_contrast(slots: Tensor, *, temperature: float, across_batch: bool, is_real: Tensor | None = None) -> Tensor:
    """How well a slot (B, T, K, D) is told from all others by itself one frame later: cross-entropy.

    Others are all slots of the same frame, of all clips of the micro-batch with `across_batch`, those of other
    processes too. As upstream, each slot of frame t + 1 asks which slot of frame t it is: the softmax runs over the
    earlier frame.
    """
    with fp32_island():
        slots = F.normalize(to_fp32(slots), dim=-1)
        everyone, begin = all_rows(slots) if across_batch else (slots, 0)
        if begin + len(slots) > len(everyone):
            return everyone.sum() * 0  # a process without clips of its own
        logits = cosines(slots, everyone, across_batch=across_batch) / temperature
        right = torch.log_softmax(logits, dim=-2).diagonal(offset=-begin * slots.shape[2], dim1=-2, dim2=-1)
        if is_real is None:
            return -right.mean()
        counts = is_real[:, 1:].unsqueeze(-1).expand(-1, -1, slots.shape[2])  # a real frame follows real ones only
        weight = counts.transpose(0, 1).flatten(1) if across_batch else counts.flatten(0, 1)
        whole = total(weight.sum()) * len(slots) / len(everyone) if across_batch else weight.sum()
        return -(right * weight).sum() / whole.clamp(min=1)


def cosines(slots: Tensor, everyone: Tensor, *, across_batch: bool) -> Tensor:
    """Of slots of unit length with those of all clips one frame earlier, (T - 1, all B·K, B·K), or within each clip,
    (B · (T - 1), K, K)."""
    if across_batch:
        earlier, later = everyone[:, :-1].transpose(0, 1).flatten(1, 2), slots[:, 1:].transpose(0, 1).flatten(1, 2)
        return earlier @ later.transpose(1, 2)
    return (slots[:, :-1] @ slots[:, 1:].transpose(2, 3)).flatten(0, 1)
