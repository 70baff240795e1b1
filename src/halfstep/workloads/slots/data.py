"""Clips to train and to validate on, from whatever lies in the data folder; normalised as upstream does, masks at the
size they are compared at."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from halfstep.data.files import BadFiles
from halfstep.data.loader import Batch
from halfstep.errors import DataError, format_count
from halfstep.workloads.slots.clips import ClipForm, ClipSamples, Crop, long_enough
from halfstep.workloads.slots.config import SlotVideoConfig, VideoDataConfig
from halfstep.workloads.slots.video_layouts import VideoPart, find_videos
from halfstep.workloads.slots.videos import what_was_left_out

COLOURS = {
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "half": ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
}
"""Mean and deviation of red, green and blue."""


def notes_on(data: SlotVideoConfig, clips: ClipData) -> list[str]:
    """What a user may not expect of the validation videos."""
    notes, found = [], len(clips.val)
    if data.val_size and data.val_size != found:
        notes.append(f"data.val_size is {data.val_size}, but there are {format_count(found, 'validation clip')}")
    if found and not clips.has_masks:
        notes.append("not all validation videos have masks: there is no FG-ARI, the loss alone is watched")
    return notes


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


def prepared_masks(batch: Mapping[str, Tensor], data: SlotVideoConfig) -> Batch:
    """The masks of a batch, where it has any."""
    return {"masks": sized_masks(batch["masks"], data.mask_size or data.image_size)} if "masks" in batch else {}


def all_clips(samples: ClipSamples) -> ClipSamples:
    """Whole videos with their masks in place of training's chunks: a folder without a validation part, evaluated."""
    members = sorted({video for video, _ in samples.places})
    part = VideoPart(videos=samples.videos, members=tuple(members))
    longest = max(part.videos.videos[index].num_frames for index in members)
    form = ClipForm(frames=longest, size=samples.form.size, crop=steady(samples.form.crop), with_masks=part.have_masks)
    return ClipSamples(part.videos, part.members, form, cut="whole")


@dataclass(frozen=True, kw_only=True, slots=True)
class ClipData:
    """Both parts, and what the user should know of them."""

    train: ClipSamples
    val: ClipSamples
    about: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]
    val_names: tuple[str, ...]
    has_masks: bool


def open_clips(config: VideoDataConfig) -> ClipData:
    """The clips of `config.dir`."""
    bad_files = BadFiles(config.on_bad_file)
    found = find_videos(
        Path(config.dir or "."),
        train_shards=config.train_shards,
        val_shards=config.val_shards,
        val_videos=config.val_videos,
        val_fraction=config.val_fraction,
        bad_files=bad_files,
    )
    members, errors = long_enough(found.train.videos, found.train.members, config.chunk_size)
    for error in errors:
        bad_files.report(error)
    if not members:
        raise DataError(
            "no video is left to train on",
            why=what_was_left_out(bad_files),
            fix="mend what was left out, or cut shorter clips: data.chunk_size",
        )
    train_form = ClipForm(
        frames=config.chunk_size, size=_own_size(config, found.train), crop=config.crop, flip=config.flip
    )
    train = ClipSamples(found.train.videos, members, train_form, cut=config.chunks)
    val_part = found.val or VideoPart(videos=found.train.videos, members=())
    val = _validation(config, val_part)
    return ClipData(
        train=train,
        val=val,
        about=(("layout", found.layout), ("clips", f"{len(train)} to train on, {len(val)} to validate on")),
        notes=bad_files.notes,
        val_names=tuple(val.name_of(index) for index in range(len(val))),
        has_masks=(found.val or found.train).have_masks,
    )


def _validation(config: VideoDataConfig, part: VideoPart) -> ClipSamples:
    lengths = [part.videos.videos[index].num_frames for index in part.members] or [1]
    wanted = config.val_chunk_size
    form = ClipForm(
        frames=min(wanted, *lengths, wanted) if wanted else max(lengths),
        size=_own_size(config, part),
        crop=steady(config.crop),
        with_masks=part.have_masks,
    )
    return ClipSamples(part.videos, part.members, form, cut="all" if wanted else "whole")


def _own_size(config: VideoDataConfig, part: VideoPart) -> int | None:
    """Where frames share a size, the device resizes them; cut to squares they may differ."""
    sizes = {part.videos.videos[index].size for index in part.members}
    return None if len(sizes) <= 1 and config.crop == "none" else config.image_size


def steady(crop: Crop) -> Crop:
    """Where nothing is drawn at random, the middle."""
    return "none" if crop == "none" else "central"


def unit_pixels(video: Tensor, side: int, **resized: Any) -> Tensor:
    """Bytes (B, T, 3, h, w) as numbers in 0..1 at the model's size; `resized` is how, in words of F.interpolate."""
    frames = video.flatten(0, 1).float().div_(255)
    if frames.shape[-2:] != (side, side):
        frames = F.interpolate(frames, (side, side), **resized).clamp_(0, 1)
    return frames.view(*video.shape[:2], *frames.shape[1:])
