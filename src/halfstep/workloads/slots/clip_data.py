"""Clips to train and to validate on, from whatever lies in the data folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from halfstep.data.clips import ClipForm, ClipSamples, Crop, long_enough
from halfstep.data.files import BadFiles
from halfstep.data.video_layouts import VideoPart, find_videos
from halfstep.data.videos import what_was_left_out
from halfstep.errors import DataError
from halfstep.workloads.slots.video_config import VideoDataConfig


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
        notes=tuple(f"left out: {error.what}" for error in bad_files.skipped),
        val_names=tuple(val.name_of(index) for index in range(len(val))),
        has_masks=val.form.with_masks,
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
