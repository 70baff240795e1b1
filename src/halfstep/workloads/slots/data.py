"""Videos of a data folder as training and validation clips; shared by all slot models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from halfstep.config.schema import RunConfig
from halfstep.data.clips import ClipForm, ClipSamples, Crop, long_enough
from halfstep.data.files import BadFiles
from halfstep.data.loader import Batch
from halfstep.data.video_layouts import FoundVideos, VideoPart, find_videos
from halfstep.errors import DataError, counted
from halfstep.workloads.slots.config import VideoDataConfig

COLOURS = {
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "half": ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
}
"""Mean and deviation of red, green and blue."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VideoData:
    """What a run reads, and what there is to say of it."""

    train: ClipSamples
    val: ClipSamples
    has_masks: bool
    store: dict[str, Any]
    about: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]
    val_names: tuple[str, ...]


def video_data(config: RunConfig) -> VideoData:
    """The clips at `data.dir`."""
    data = config.data
    assert isinstance(data, VideoDataConfig)
    if data.dir is None:
        raise DataError("no data folder", why="videos are read from data.dir", fix="--data-dir DIR")
    bad_files = BadFiles(data.on_bad_file)
    found = find_videos(
        Path(data.dir), train_shards=data.train_shards, val_shards=data.val_shards, val_videos=data.val_videos,
        val_fraction=data.val_fraction, bad_files=bad_files,
    )  # fmt: skip
    train_members = _long_enough(found.train, data.chunk_size, bad_files)
    val = found.val or VideoPart(videos=found.train.videos, members=())
    side = None if _share_one_size(found) or data.crop != "none" and _share_one_crop(found) else data.image_size
    has_masks = val.have_masks
    train = ClipSamples(
        found.train.videos, train_members,
        ClipForm(frames=data.chunk_size, size=side, crop=data.crop, flip=data.flip), cut=data.chunks,
    )  # fmt: skip
    longest = max((val.videos.videos[index].num_frames for index in val.members), default=1)
    frames = min(longest, data.val_frames) if data.val_frames else longest
    form = ClipForm(frames=frames, size=side, crop=steady(data.crop), with_masks=has_masks)
    validation = ClipSamples(val.videos, val.members, form, cut="whole")
    return VideoData(
        train=train,
        val=validation,
        has_masks=has_masks,
        store={"background_is_labelled": val.videos.labels_background, "has_masks": has_masks},
        about=(("layout", found.layout), ("videos", _counts(found, train_members))),
        notes=(*_notes(data, val), *(f"left out: {error.what}" for error in bad_files.skipped)),
        val_names=val.names,
    )


def _long_enough(part: VideoPart, frames: int, bad_files: BadFiles) -> list[int]:
    members, errors = long_enough(part.videos, part.members, frames)
    for error in errors:
        bad_files.report(error)
    if not members:
        raise DataError("no video is left to train on", why=f"{counted(len(bad_files.skipped), 'problem')} met")
    return members


def _sizes(found: FoundVideos) -> set[tuple[int, int]]:
    parts = (found.train, *([found.val] if found.val else []))
    return {part.videos.videos[index].size for part in parts for index in part.members}


def _share_one_size(found: FoundVideos) -> bool:
    return len(_sizes(found)) == 1


def _share_one_crop(found: FoundVideos) -> bool:
    return len({min(size) for size in _sizes(found)}) == 1


def _counts(found: FoundVideos, train_members: list[int]) -> str:
    num_val = len(found.val.members) if found.val else 0
    return f"{len(train_members):,} to train on, {num_val:,} to validate on"


def _notes(data: VideoDataConfig, val: VideoPart) -> list[str]:
    notes = []
    if data.val_size and data.val_size != len(val.members):
        notes.append(f"data.val_size is {data.val_size}, but there are {counted(len(val.members), 'validation video')}")
    if val.members and not val.have_masks:
        with_masks = sum(val.videos.videos[index].has_masks for index in val.members)
        videos = counted(len(val.members), "validation video")
        notes.append(f"{with_masks} of {videos} have masks: there is no FG-ARI, the loss alone is watched")
    return notes


def steady(crop: Crop) -> Crop:
    """Where nothing is drawn at random, the middle."""
    return "none" if crop == "none" else "central"


def unit_pixels(video: Tensor, side: int) -> Tensor:
    """Bytes (B, T, 3, h, w) to floats in 0..1 at the model's size, as upstream resizes: bicubic, clamped."""
    frames = video.flatten(0, 1).float() / 255
    if frames.shape[-2:] != (side, side):
        frames = F.interpolate(frames, (side, side), mode="bicubic").clamp(0, 1)
    return frames.view(*video.shape[:2], *frames.shape[1:])


def normalised(pixels: Tensor, how: str) -> Tensor:
    mean, deviation = COLOURS[how]
    shape = (1, 1, 3, 1, 1)
    # Filled on the device: a copy from the host would wait for it.
    centre, spread = (
        torch.stack([torch.full((), value, device=pixels.device) for value in values]).view(shape)
        for values in (mean, deviation)
    )
    return (pixels - centre) / spread


def sized_masks(masks: Tensor, side: int) -> Tensor:
    """Labels (B, T, h, w) at the size they are compared at: the nearest pixel's."""
    if masks.shape[-2:] == (side, side):
        return masks
    return F.interpolate(masks, (side, side), mode="nearest-exact")


def prepared_masks(batch: Mapping[str, Tensor], data: VideoDataConfig) -> Batch:
    """The masks of a batch, where it has any."""
    return {"masks": sized_masks(batch["masks"], data.mask_size or data.image_size)} if "masks" in batch else {}


def all_clips(samples: ClipSamples) -> ClipSamples:
    """Whole videos with their masks in place of training's chunks: a folder without a validation part, evaluated."""
    members = sorted({video for video, _ in samples.places})
    part = VideoPart(videos=samples.videos, members=tuple(members))
    longest = max(part.videos.videos[index].num_frames for index in members)
    form = ClipForm(frames=longest, size=samples.form.size, crop=steady(samples.form.crop), with_masks=part.have_masks)
    return ClipSamples(part.videos, part.members, form, cut="whole")
