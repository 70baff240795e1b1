"""Evaluation and prediction of slots: FG-ARI and mBO, the share of each slot, and sheets and gifs of clips."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from halfstep.errors import CheckpointError, DataError, format_count
from halfstep_train.config.schema import RunConfig
from halfstep_train.data.files import Array, BadFiles
from halfstep_train.data.loader import Batch
from halfstep_train.report.run_report import Answer, Bar, Cell, Failure
from halfstep_train.workloads.base.kind import Store
from halfstep_train.workloads.base.sheets import pick_worst_to_best
from halfstep_train.workloads.base.using import (
    Input,
    LookAt,
    PlainEvaluation,
    PredictRequest,
    TrainedModel,
    describe_failure,
    save_picture,
    use_folder,
)
from halfstep_train.workloads.base.workload import Forward, FrozenPart, Prepare, Workload
from halfstep_train.workloads.slots.build import (
    PrepareClips,
    SlotTask,
    build_backbone,
    build_model,
    build_steve_model,
    build_words_model,
)
from halfstep_train.workloads.slots.config import SlotContrastConfig, SteveConfig, WordsConfig
from halfstep_train.workloads.slots.data import (
    ClipSamples,
    choose_steady_crop,
    compute_crop_box,
    draw_sheet,
    make_steady_clips,
    make_views,
    write_gif,
)
from halfstep_train.workloads.slots.scores import SlotMetrics, SteveMetrics, label_pixels
from halfstep_train.workloads.slots.steve import Steve
from halfstep_train.workloads.slots.videos import (
    FRAME_ENDINGS,
    FRAME_FOLDERS,
    VIDEO_ENDINGS,
    is_mask,
    open_shards,
    open_video_file,
    read_frame_files,
)

SHOWN_EACH = 2
"""Number of worst, of median and of best clips that are drawn."""


class SlotDetails(SlotMetrics):
    """Validation metrics that also keep the FG-ARI of each clip and the number of pixels of each slot."""

    def __init__(self, counted: SlotMetrics) -> None:
        super().__init__(ignore_background=bool(counted.from_label), skip_empty=counted.skip_empty)
        self._shares: list[Tensor] = []

    def update(self, outputs: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> None:
        masks = outputs["masks"]
        is_real = batch.get("is_real", torch.ones(masks.shape[:2], dtype=torch.bool, device=masks.device))
        # Count pixels at the resolution of the masks.
        side = round(masks.shape[-1] ** 0.5)
        winners = torch.nn.functional.one_hot(label_pixels(masks, (side, side)).flatten(2), masks.shape[2])
        self._shares.append((winners.sum(2) * is_real.unsqueeze(-1)).sum((0, 1)))
        super().update(outputs, batch)

    def add_clips(self, masks: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        scores = super().add_clips(masks, batch)
        self.add_ranked(batch["index"], scores)
        return scores

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
        return replace(workload, val_samples=make_steady_clips(samples.videos, size=samples.size, crop=samples.crop))

    def score_classes(self) -> tuple[dict[str, Cell], ...]:
        return tuple(
            {"slot": str(k), "share of pixels": share} for k, share in enumerate(self.metrics.compute_shares())
        )

    def draw_pictures(self, folder: Path, look: LookAt) -> list[Path]:
        """Write a sheet and a gif of each chosen clip."""
        written = []
        # Without true masks nothing is ranked: draw the first clips.
        first = [("first", index, 0.0) for index in range(min(2 * SHOWN_EACH, len(self.workload.val_samples)))]
        for kind, index, _ in pick_worst_to_best(self.metrics.rank_samples(), SHOWN_EACH) or first:
            _, outputs = look(index)
            sample = self.workload.val_samples.sample(index, key=(0, 0, index))
            frames, slots, truth = make_views({name: value.unsqueeze(0) for name, value in sample.items()}, outputs)
            picture, moving = folder / f"{kind}_clip_{index}.png", folder / f"{kind}_clip_{index}.gif"
            Image.fromarray(draw_sheet(frames, slots, truth)).save(picture)
            write_gif(moving, frames, slots)
            written += [picture, moving]
        return written


# --- halfstep predict ---
#
# The images of one folder are the frames of one video, in natural order; masks are ignored.


class SlotPredictor:
    """Predictor of SlotContrast: writes a gif, a sheet and an array per video."""

    endings = (*VIDEO_ENDINGS, ".tar", *FRAME_ENDINGS)
    config: SlotContrastConfig | SteveConfig
    frozen: dict[str, FrozenPart]
    model: nn.Module
    _forward: Forward
    _prepare: Prepare

    def __init__(self, config: SlotContrastConfig, store: Store) -> None:
        self.config = config
        backbone = build_backbone(config)
        self.frozen = {"backbone": backbone}
        # The masks are those of SlotContrast's decoder, also with words.
        self.model = (
            build_words_model(config, backbone.module)
            if isinstance(config, WordsConfig)
            else build_model(config, backbone.module)
        )
        task = SlotTask(config, backbone.module)
        self._forward, self._prepare = task.forward, task.prepare

    def answer_all(
        self, inputs: list[Input], trained: TrainedModel, request: PredictRequest, bar: Bar
    ) -> Iterator[Answer | Failure]:
        """Yield one answer per source: a folder of frames, a file, or a tar of several videos."""
        assert request.out is not None
        inputs = [item for item in inputs if not is_mask(item.path)] or inputs
        # Consecutive frames of one folder form a video.
        videos = [list(items) for _, items in groupby(inputs, key=_find_source)]
        bar.total = len(videos)
        for items in videos:
            try:
                found = [self._write_video(name, frames, trained, request.out) for name, frames in _read_videos(items)]
                yield _make_answer(_find_source(items[0]), found)
            except DataError as error:
                yield describe_failure(replace(items[0], path=_find_source(items[0])), error)

    def _write_video(self, name: Path, frames: Array, trained: TrainedModel, out: Path) -> tuple[Path, list[float]]:
        """Predict the slots of a video and write gif, sheet and array; return their path and the share of each slot."""
        box = compute_crop_box((frames.shape[1], frames.shape[2]), choose_steady_crop(self.config.data.crop), ())
        frames = np.array(frames[(slice(None), *box)])
        slots = self._predict_slots(torch.from_numpy(frames).movedim(-1, 1), trained)
        sheet = save_picture(Image.fromarray(draw_sheet(frames, slots, None)), out / f"{name}.png")
        path = sheet.with_suffix("")
        try:
            write_gif(path.with_name(f"{path.name}.gif"), frames, slots)
            np.save(path.with_name(f"{path.name}_slots.npy"), slots.astype(np.uint8))
        except OSError as error:
            raise CheckpointError(
                f"cannot write below {out}: {error}", fix="free disk space, or choose another folder: --out DIR"
            ) from error
        counts = np.bincount(slots.ravel(), minlength=self.config.model.slots)
        return path, [float(share) for share in counts / counts.sum()]

    def _predict_slots(self, video: Tensor, trained: TrainedModel) -> Array:
        """Return the slot (T, H, W) of each pixel."""
        batch = {"video": video.unsqueeze(0).to(trained.device)}
        with torch.no_grad():
            prepared = self._prepare(batch, key=(0,), training=False)
        with trained.inference():
            outputs = self._forward(trained.model, prepared)
        labels = label_pixels(outputs["masks"], (video.shape[-2], video.shape[-1]))
        return labels[0].cpu().numpy()


def _is_frame(item: Input) -> bool:
    return item.path.suffix.lower() in FRAME_ENDINGS


def _find_source(item: Input) -> Path:
    return item.path.parent if _is_frame(item) else item.path


def _read_videos(items: list[Input]) -> Iterator[tuple[Path, Array]]:
    """Yield the name (without extension) and frames (T, H, W, 3) uint8 of each video of one source."""
    item = items[0]
    if _is_frame(item):
        yield _choose_name(item), read_frame_files([entry.path for entry in items])
    elif item.path.suffix.lower() == ".tar":
        for video in open_shards(item.path.parent, item.path.name, BadFiles("error")):
            yield item.name.with_suffix("") / video.name.rpartition("/")[2], video.read_frames(0, video.num_frames)
    else:
        file = open_video_file(item.path)
        yield item.name.with_suffix(""), file.read_frames(0, file.num_frames)


def _choose_name(item: Input) -> Path:
    """Return the name of the folder with the frames, or of the folder above it if it is called `frames` or similar."""
    inside, up = item.name.parent, 0
    if inside.name in FRAME_FOLDERS:
        inside, up = inside.parent, 1
    return inside if inside.name else Path(item.path.resolve().parents[up].name)


def _make_answer(source: Path, found: list[tuple[Path, list[float]]]) -> Answer:
    gifs = [f"{path}.gif" for path, _ in found]
    shares = {f"slot {k}": share for k, share in enumerate(found[0][1])}
    num_used = sum(share > 0.01 for share in found[0][1])
    shown = gifs[0] if len(gifs) == 1 else f"{gifs[0]} and {len(gifs) - 1} more"
    return Answer(
        file=str(source),
        found={"gifs": gifs, "shares": shares},
        brief={"gif": shown, "in use": format_count(num_used, "slot")},
    )


class StevePredictor(SlotPredictor):
    """Predictor of STEVE; its masks are the attention of slots."""

    def __init__(self, config: SteveConfig, store: Store) -> None:
        self.config, self.frozen, self.model = config, {}, build_steve_model(config)
        self._forward, self._prepare = compute_masks, PrepareClips(config)


def compute_masks(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """Return STEVE's attention masks without running its VAE and decoder."""
    assert isinstance(model, Steve)
    _, attention = model.steve_encoder(batch["video"], batch["slot_draw"])
    return {"masks": attention.flatten(3)}
