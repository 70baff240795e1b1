"""Evaluation of slots: FG-ARI and mBO, the share of each slot, and sheets and gifs of the worst and best clips."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from halfstep_train.config.schema import RunConfig
from halfstep_train.report.results import Cell
from halfstep_train.workloads.base.sheets import pick_worst_to_best
from halfstep_train.workloads.base.using import LookAt, PlainEvaluation, use_folder
from halfstep_train.workloads.base.workload import Workload
from halfstep_train.workloads.slots.data import ClipSamples, make_steady_clips
from halfstep_train.workloads.slots.pictures import draw_sheet, make_views, write_gif
from halfstep_train.workloads.slots.scores import SlotMetrics, SteveMetrics, label_pixels

SHOWN_EACH = 2
"""Number of worst, of median and of best clips that are drawn."""


class SlotDetails(SlotMetrics):
    """Validation metrics that also keep the FG-ARI of each clip and the number of pixels of each slot."""

    def __init__(self, counted: SlotMetrics) -> None:
        super().__init__(ignore_background=bool(counted.from_label), skip_empty=counted.skip_empty)
        self._scored: list[tuple[Tensor, Tensor]] = []
        self._shares: list[Tensor] = []

    def update(self, outputs: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> None:
        masks = outputs["masks"]
        is_real = batch.get("is_real", torch.ones(masks.shape[:2], dtype=torch.bool, device=masks.device))
        # Count pixels at the resolution of the masks.
        side = round(masks.shape[-1] ** 0.5)
        winners = torch.nn.functional.one_hot(label_pixels(masks, (side, side)).flatten(2), masks.shape[2])
        self._shares.append((winners.sum(2) * is_real.unsqueeze(-1)).sum((0, 1)))
        if "masks" in batch:
            true = batch["masks"]
            labels = label_pixels(masks, (true.shape[-2], true.shape[-1]))
            scores = self.add_labels(true, labels, masks.shape[2], batch.get("is_real"))
            self._scored.append((batch["index"], scores))

    def rank_clips(self) -> list[tuple[int, float]]:
        """Return (clip, FG-ARI), worst first; waits for the device."""
        pairs = [pair for index, scores in self._scored for pair in zip(index.tolist(), scores.tolist(), strict=True)]
        return sorted(pairs, key=lambda pair: (pair[1], pair[0]))

    def compute_shares(self) -> list[float]:
        """Return the share of all pixels that each slot takes."""
        total = torch.stack(self._shares).sum(0).double()
        return (total / total.sum()).tolist()


class SteveDetails(SteveMetrics, SlotDetails):
    """The same details, with STEVE's losses."""


class SlotEvaluation(PlainEvaluation):
    """Evaluation of all slot models; its classes are slots."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        counted = workload.metrics()
        assert isinstance(counted, SlotMetrics)
        details = SteveDetails if isinstance(counted, SteveMetrics) else SlotDetails
        self.metrics: SlotDetails = details(counted)

    @staticmethod
    def change_data_folder(config: RunConfig, folder: Path) -> RunConfig:
        """Return settings for another folder, without shard patterns; if it has no split, all its videos are
        evaluated."""
        return use_folder(config, folder, train_shards="", val_shards="", val_videos=(), val_fraction=0.0)

    @staticmethod
    def use_all_samples(workload: Workload) -> Workload:
        if len(workload.val_samples):
            return workload
        samples = workload.train_samples
        assert isinstance(samples, ClipSamples)
        whole = make_steady_clips(samples.videos, size=samples.size, crop=samples.crop)
        return replace(workload, val_samples=whole, val_names=whole.list_names())

    def score_classes(self) -> tuple[dict[str, Cell], ...]:
        return tuple(
            {"slot": str(k), "share of pixels": share} for k, share in enumerate(self.metrics.compute_shares())
        )

    def draw_pictures(self, folder: Path, look: LookAt) -> list[Path]:
        """Write a sheet and a gif of each chosen clip."""
        written = []
        # Without true masks nothing is ranked: draw the first clips.
        first = [("first", index, 0.0) for index in range(min(2 * SHOWN_EACH, len(self.workload.val_samples)))]
        for kind, index, _ in pick_worst_to_best(self.metrics.rank_clips(), SHOWN_EACH) or first:
            _, outputs = look(index)
            sample = self.workload.val_samples.sample(index, key=(0, 0, index))
            frames, slots, truth = make_views({name: value.unsqueeze(0) for name, value in sample.items()}, outputs)
            picture, moving = folder / f"{kind}_clip_{index}.png", folder / f"{kind}_clip_{index}.gif"
            Image.fromarray(draw_sheet(frames, slots, truth)).save(picture)
            write_gif(moving, frames, slots)
            written += [picture, moving]
        return written
