"""Losses of slot models, and scores of slot masks against true masks (FG-ARI, mBO), per video and per frame.

All scores follow from one table per frame, in float64: how many pixels of true label c went to slot k. The table of a
video is the sum of its frames' tables, so a slot that swaps objects over time lowers the score of the video, but not
those of its frames.

    ARI    Rand index adjusted for chance; FG-ARI leaves out pixels of label 0
    mBO    for each true object the largest IoU with any slot, averaged over objects

A clip or frame with nothing to distinguish (0/0) counts as ARI 1, as in SlotContrast; `empty` counts those without any
foreground, and `skip_empty` leaves them out. mBO always leaves them out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from halfstep.islands import fp32_island, to_fp32
from halfstep_train.config.schema import RunConfig
from halfstep_train.workloads.base.over_ranks import gather_rows, sum_over_ranks
from halfstep_train.workloads.base.sums import Sums
from halfstep_train.workloads.slots.steve import SteveOutputs

NUM_LABELS = 256
"""Masks are bytes. A table of all 256 labels is small, and finding the largest label would wait for the device."""
RESIZED = 2**26
"""Numbers resized at a time: a minute of video, with one mask per slot, would take tens of GB."""
SCORES = ("fg_ari", "fg_ari_image", "ari", "ari_image", "mbo", "mbo_image")


def label_pixels(masks: Tensor, size: tuple[int, int]) -> Tensor:
    """Return the slot (B, T, H, W) of each pixel: resize soft masks (B, T, K, P) of a square grid, then argmax."""
    with fp32_island():
        batch, frames, slots, patches = masks.shape
        side = round(patches**0.5)
        grid = to_fp32(masks).reshape(batch * frames, slots, side, side)
        at_once = max(1, RESIZED // (slots * size[0] * size[1]))
        labels = torch.cat([F.interpolate(part, size, mode="bilinear").argmax(1) for part in grid.split(at_once)])
        return labels.view(batch, frames, *size)


def count_labels(true: Tensor, slots: Tensor, num_slots: int) -> Tensor:
    """Return pixel counts (B, T, labels, slots) as float64 from label maps (B, T, H, W)."""
    batch, frames = true.shape[:2]
    # One number per (label, slot) pair, counted by scatter_add_: bincount would make the host wait.
    cells = true.long().flatten(2) * num_slots + slots.long().flatten(2)
    table = torch.zeros(batch * frames, NUM_LABELS * num_slots, dtype=torch.int64, device=true.device)
    table.scatter_add_(1, cells.flatten(0, 1), torch.ones_like(cells).flatten(0, 1))
    return table.double().view(batch, frames, NUM_LABELS, num_slots)


def adjusted_rand_index(table: Tensor) -> Tensor:
    """Return the ARI (...) of tables (..., labels, slots); 1 where it is 0/0, as with a single cluster on both
    sides."""
    rows, columns = table.sum(-1), table.sum(-2)
    total = rows.sum(-1)
    in_both = count_pairs(table).sum((-1, -2))
    in_truth, in_slots = count_pairs(rows).sum(-1), count_pairs(columns).sum(-1)
    # Hubert & Arabie 1985: (index - expected) / (maximum - expected), on pairs of pixels in the same cluster.
    expected = in_truth * in_slots / count_pairs(total).clamp(min=1)
    room = (in_truth + in_slots) / 2 - expected
    return torch.where(room != 0, (in_both - expected) / torch.where(room != 0, room, 1), 1.0)


def count_pairs(count: Tensor) -> Tensor:
    """Return the number of ordered pairs of `count` points."""
    return count * (count - 1)


def mean_best_overlap(table: Tensor, *, from_label: int) -> tuple[Tensor, Tensor]:
    """Return mBO (...) over the labels from `from_label` on, and whether any of them exists."""
    truth, sizes = table[..., from_label:, :], table.sum(-2, keepdim=True)
    true_sizes = truth.sum(-1)
    # IoU = intersection / (true + predicted - intersection).
    union = true_sizes.unsqueeze(-1) + sizes - truth
    best = torch.where(union > 0, truth / union.clamp(min=1), 0.0).amax(-1)
    is_there = true_sizes > 0
    count = is_there.sum(-1)
    return (best * is_there).sum(-1) / count.clamp(min=1), count > 0


class SlotMetrics(Sums):
    """Sums of scores over a data set, from soft `masks` of slots and, if the batch has them, true `masks`."""

    def __init__(self, *, ignore_background: bool = True, skip_empty: bool = False) -> None:
        super().__init__()
        self.from_label, self.skip_empty = int(ignore_background), skip_empty

    def update(self, outputs: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> None:
        if "masks" in batch:
            self.add_clips(outputs["masks"], batch)

    def add_clips(self, masks: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """Score soft masks of slots, add to the sums, and return the FG-ARI of each clip."""
        true = batch["masks"]
        slots = label_pixels(masks, (true.shape[-2], true.shape[-1]))
        return self.add_labels(true, slots, masks.shape[2], batch.get("is_real"))

    def add_labels(self, true: Tensor, slots: Tensor, num_slots: int, is_real: Tensor | None = None) -> Tensor:
        """Score label maps (B, T, H, W), add to the sums, and return the FG-ARI of each clip. Padding frames do not
        count."""
        frames = count_labels(true, slots, num_slots)
        real = torch.ones(frames.shape[:2], dtype=torch.bool, device=true.device) if is_real is None else is_real
        frames = frames * real[..., None, None]
        clips = frames.sum(1)
        # First the tables of clips (B, labels, slots), then those of frames (B, T, labels, slots).
        for kind, table, counted in (("", clips, real.any(1)), ("_image", frames, real)):
            foreground = table[..., 1:, :]
            has_foreground = counted & (foreground.sum((-1, -2)) > 0)
            fg_counted = has_foreground if self.skip_empty else counted
            overlap, has_any = mean_best_overlap(table, from_label=self.from_label)
            self.add_mean(f"fg_ari{kind}", adjusted_rand_index(foreground), fg_counted)
            self.add_mean(f"ari{kind}", adjusted_rand_index(table), counted)
            self.add_mean(f"mbo{kind}", overlap, has_any & counted)
            self.add(**{f"empty{kind}": (counted & ~has_foreground).sum()})
        return adjusted_rand_index(clips[:, 1:])

    def compute(self) -> dict[str, float]:
        """Return the six scores and the numbers of clips and frames without foreground; empty without true masks. Waits
        for the device."""
        if "empty" not in self.sums:
            return {}
        pairs = {name: self.sums[name].tolist() for name in SCORES}
        scores = {name: total / count for name, (total, count) in pairs.items() if count}
        return scores | {name: float(self.sums[name]) for name in ("empty", "empty_image")}


TEMPERATURE = 0.1
"""Temperature of the slot-contrast loss in all published configs."""


def slot_contrast(slots: Tensor, is_real: Tensor | None = None) -> Tensor:
    """Return the cross-entropy of recognising each slot (B, T, K, D) in the next frame.

    The candidates are the slots of the frame in all clips of the micro-batch, on all ranks. As upstream, the softmax
    runs over the earlier frame: each slot of frame t + 1 is matched to one of frame t.
    """
    with fp32_island():
        slots = F.normalize(to_fp32(slots), dim=-1)
        all_slots, begin = gather_rows(slots)
        if begin + len(slots) > len(all_slots):
            # A rank without clips: 0, but with gradients, so that its backward pass takes part.
            return all_slots.sum() * 0
        logits = compute_cosines(slots, all_slots) / TEMPERATURE
        # The correct match is the same slot of the same clip. The clips of this rank start at row `begin` of all clips.
        right = torch.log_softmax(logits, dim=-2).diagonal(offset=-begin * slots.shape[2], dim1=-2, dim2=-1)
        if is_real is None:
            return -right.mean()
        # Padding is at the end, so frame t is real if t + 1 is.
        counts = is_real[:, 1:].unsqueeze(-1).expand(-1, -1, slots.shape[2])
        weight = counts.transpose(0, 1).flatten(1)
        # The step weights each rank by its number of clips, which cancels the factor len(slots) / len(all_slots).
        whole = sum_over_ranks(weight.sum()) * len(slots) / len(all_slots)
        return -(right * weight).sum() / whole.clamp(min=1)


def compute_cosines(slots: Tensor, all_slots: Tensor) -> Tensor:
    """Return the cosines (T - 1, all B·K, B·K) of normalised slots with those of all clips one frame earlier."""
    earlier, later = all_slots[:, :-1].transpose(0, 1).flatten(1, 2), slots[:, 1:].transpose(0, 1).flatten(1, 2)
    return earlier @ later.transpose(1, 2)


HALF_LARGEST = 65504.0
"""Largest number of fp16."""


def compute_temperature(tau: tuple[float, float, int], step: int) -> float:
    """Return the temperature at a step: a cosine from the first to the last one over a number of steps."""
    start, final, steps = tau
    progress = min(step / steps, 1.0)
    return final + (start - final) * 0.5 * (1 + math.cos(math.pi * progress))


def compute_total_loss(outputs: SteveOutputs, reduction: Literal["sum", "mean"]) -> Tensor:
    """Return the squared error of the VAE + the cross-entropy of words, each as a sum or mean over a frame."""
    if reduction == "sum":
        return outputs.mse + outputs.cross_entropy
    return outputs.mse / outputs.reconstruction[0, 0].numel() + outputs.cross_entropy / outputs.words.shape[1]


def choose_start_scale(image_size: int) -> float:
    """Return a loss scale at which summed losses do not overflow fp16.

    The gradient of the last bias sums 2 · error over all pixels of a frame, and those of earlier layers are similar.
    """
    # 8 · pixels = the sum of 2 · error over a frame, with errors up to 1, times a margin of 4.
    return 2.0 ** math.floor(math.log2(HALF_LARGEST / (8 * image_size**2)))


def settle_scale(config: RunConfig) -> dict[str, float]:
    """Return settings for the initial loss scale and its minimum, unless the user set them."""
    named = config.scaler.model_fields_set
    if "init_scale" in named:
        return {}
    scale = choose_start_scale(config.data.image_size)
    floor = {} if "min_scale" in named else {"scaler.min_scale": min(config.scaler.min_scale, scale / 2**12)}
    return floor | {"scaler.init_scale": scale}


LOSSES = ("loss", "mse", "cross_entropy")


class SteveMetrics(SlotMetrics):
    """The loss, its terms as sums over a frame, and scores of masks if there are true ones."""

    def update(self, outputs: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> None:
        num = torch.full((), float(len(batch["video"])), dtype=torch.float64, device=outputs["loss"].device)
        self.add(losses=torch.stack([*(outputs[name].detach().double() * num for name in LOSSES), num]))
        super().update(outputs, batch)

    def compute(self) -> dict[str, float]:
        if not self.sums:
            return {}
        *sums, num = self.sums["losses"].tolist()
        return {name: total / num for name, total in zip(LOSSES, sums, strict=True)} | super().compute()
