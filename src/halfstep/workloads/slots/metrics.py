"""FG-ARI and mBO of slot masks against true masks, per video and per frame, in float64.

All of them follow from one table for each frame: how many pixels of true label c went to slot k. A video's table is the
sum of its frames', so that a slot that swaps objects in time is punished there and not in the frames.

    ARI    Rand index adjusted for chance over the pixels that count; FG-ARI leaves those of label 0 out
    mBO    for each true object the largest IoU with any slot, averaged over the objects there are

A clip or frame in which nothing could be told apart (0/0) counts as ARI 1, as in SlotContrast; `empty` says how many
had no foreground at all, and `skip_empty` leaves them out. mBO leaves them out always.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from halfstep.islands import fp32_island, to_fp32

NUM_LABELS = 256
"""Masks are bytes; a table of all labels is small, and asking for the largest would wait for the device."""
SCORES = ("fg_ari", "fg_ari_image", "ari", "ari_image", "mbo", "mbo_image")


def slot_labels(masks: Tensor, size: tuple[int, int]) -> Tensor:
    """The slot (B, T, H, W) of each pixel from soft masks (B, T, K, P) on a square grid: resized, then the largest."""
    with fp32_island():
        batch, frames, slots, patches = masks.shape
        side = round(patches**0.5)
        grid = to_fp32(masks).reshape(batch * frames, slots, side, side)
        labels = F.interpolate(grid, size, mode="bilinear").argmax(1)
        return labels.view(batch, frames, *size)


def label_table(true: Tensor, slots: Tensor, num_slots: int) -> Tensor:
    """Pixels (B, T, labels, slots) as float64 from label maps (B, T, H, W)."""
    batch, frames = true.shape[:2]
    cells = true.long().flatten(2) * num_slots + slots.long().flatten(2)
    table = torch.zeros(batch * frames, NUM_LABELS * num_slots, dtype=torch.int64, device=true.device)
    table.scatter_add_(1, cells.flatten(0, 1), torch.ones_like(cells).flatten(0, 1))
    return table.double().view(batch, frames, NUM_LABELS, num_slots)


def adjusted_rand_index(table: Tensor) -> Tensor:
    """ARI (...) of tables (..., labels, slots); 1 where both sides are one cluster, or hold no two pixels together."""
    rows, columns = table.sum(-1), table.sum(-2)
    total = rows.sum(-1)
    together = pairs(table).sum((-1, -2))
    in_truth, in_slots = pairs(rows).sum(-1), pairs(columns).sum(-1)
    expected = in_truth * in_slots / pairs(total).clamp(min=1)
    room = (in_truth + in_slots) / 2 - expected
    return torch.where(room != 0, (together - expected) / torch.where(room != 0, room, 1), 1.0)


def pairs(count: Tensor) -> Tensor:
    """Ordered pairs of so many points."""
    return count * (count - 1)


def mean_best_overlap(table: Tensor, *, from_label: int) -> tuple[Tensor, Tensor]:
    """mBO (...) over the labels from `from_label` on, and whether any of them is there; slots cover every pixel."""
    truth, sizes = table[..., from_label:, :], table.sum(-2, keepdim=True)
    true_sizes = truth.sum(-1)
    union = true_sizes.unsqueeze(-1) + sizes - truth
    best = torch.where(union > 0, truth / union.clamp(min=1), 0.0).amax(-1)
    is_there = true_sizes > 0
    count = is_there.sum(-1)
    return (best * is_there).sum(-1) / count.clamp(min=1), count > 0


class SlotMetrics:
    """Sums over a data set; a batch brings soft `masks` of slots and true `masks`, where there are any."""

    def __init__(self, *, ignore_background: bool = True, skip_empty: bool = False) -> None:
        self.from_label, self.skip_empty = int(ignore_background), skip_empty
        self._sums: Tensor | None = None

    def update(self, outputs: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> None:
        """Count one batch."""
        if "masks" not in batch:
            return
        true = batch["masks"]
        slots = slot_labels(outputs["masks"], (true.shape[-2], true.shape[-1]))
        self.count(true, slots, outputs["masks"].shape[2], batch.get("is_real"))

    def count(self, true: Tensor, slots: Tensor, num_slots: int, is_real: Tensor | None = None) -> Tensor:
        """Count label maps (B, T, H, W); gives FG-ARI of each clip. Frames that are not real do not count."""
        frames = label_table(true, slots, num_slots)
        real = torch.ones(frames.shape[:2], dtype=torch.bool, device=true.device) if is_real is None else is_real
        frames = frames * real[..., None, None]
        clips = frames.sum(1)
        scores, counts = [], []
        for table, counted in ((clips, real.any(1)), (frames, real)):
            foreground = table[..., 1:, :]
            has_foreground = counted & (foreground.sum((-1, -2)) > 0)
            fg_counted = has_foreground if self.skip_empty else counted
            for value, valid in (
                (adjusted_rand_index(foreground), fg_counted),
                (adjusted_rand_index(table), counted),
                self._overlap(table, counted),
            ):
                scores.append(torch.where(valid, value, 0.0).sum())
                counts.append(valid.sum().double())
            counts.append((counted & ~has_foreground).sum().double())
            scores.append(torch.zeros_like(scores[0]))
        found = torch.stack([torch.stack(scores), torch.stack(counts)])
        self._sums = found if self._sums is None else self._sums.to(found.device) + found
        return adjusted_rand_index(clips[:, 1:])

    def _overlap(self, table: Tensor, counted: Tensor) -> tuple[Tensor, Tensor]:
        value, has_any = mean_best_overlap(table, from_label=self.from_label)
        return value, has_any & counted

    def compute(self) -> dict[str, float]:
        """The six scores, where there were masks, and how many clips and frames had no foreground. Waits."""
        if self._sums is None:
            return {}
        sums, counts = self._sums.cpu().tolist()
        names = ("fg_ari", "ari", "mbo", "empty", "fg_ari_image", "ari_image", "mbo_image", "empty_image")
        found = {name: (total, count) for name, total, count in zip(names, sums, counts, strict=True)}
        scores = {name: found[name][0] / found[name][1] for name in SCORES if found[name][1]}
        return scores | {name: found[name][1] for name in ("empty", "empty_image")}

    def state_dict(self) -> dict[str, Tensor]:
        return {} if self._sums is None else {"sums": self._sums}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self._sums = state.get("sums")
