"""Clips cut from videos as samples: each a pure function of (seed, epoch, index).

Training uses chunks of a few frames that start at multiples of their length: one at random per video and epoch, or all
of them. Validation uses whole videos; shorter ones are padded with their last frame, and `is_real` marks the frames
that count. Frames keep their size if all videos have the same one, since the device resizes faster; otherwise they
are resized here. Colours are normalised as upstream does; masks are resized to the size at which they are compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from halfstep.errors import DataError, format_count, make_printable
from halfstep_train.data.files import Array, BadFiles
from halfstep_train.data.loader import Batch
from halfstep_train.data.seeds import make_generator
from halfstep_train.workloads.slots.config import VideoDataConfig
from halfstep_train.workloads.slots.video_layouts import VideoSplit, find_videos
from halfstep_train.workloads.slots.videos import Videos, describe_left_out

Crop = Literal["none", "central", "random"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ClipForm:
    """How the frames of a clip are cut and resized before batching."""

    frames: int
    """Frames per clip; shorter videos are padded."""
    size: int | None = None
    """Side that frames are resized to; None: all videos share a size and keep it."""
    crop: Crop = "none"
    """A square as large as the shorter side, in the centre or at random; none: the whole frame, distorted to a
    square."""
    flip: float = 0.0
    with_masks: bool = False


class ClipSamples:
    """Clips from some videos of a set: one random chunk per video, all chunks, or whole videos."""

    def __init__(
        self, videos: Videos, members: Sequence[int], form: ClipForm, *, cut: Literal["one", "all", "whole"]
    ) -> None:
        self.videos, self.form, self.cut = videos, form, cut
        # (video, chunk) of each clip; with cut="one" the chunk is drawn in `sample`.
        per_video = {index: videos.videos[index].num_frames // form.frames for index in members}
        self.clips = [(index, chunk) for index in members for chunk in range(per_video[index] if cut == "all" else 1)]
        self._chunks = per_video
        lengths = {videos.videos[index].num_frames for index in members}
        self.are_filled = cut == "whole" and any(length < form.frames for length in lengths)

    def __len__(self) -> int:
        return len(self.clips)

    def sample(self, index: int, *, key: tuple[int, int, int]) -> dict[str, Tensor]:
        video, chunk = self.clips[index]
        # Four numbers per sample: the chunk, the position of the crop (vertical, horizontal), and the flip.
        draw = torch.rand(4, generator=make_generator(*key), dtype=torch.float64).tolist()
        if self.cut == "one":
            chunk = int(draw[0] * self._chunks[video])
        first = chunk * self.form.frames
        count = min(self.form.frames, self.videos.videos[video].num_frames - first)
        box = compute_crop_box(self.videos.videos[video].size, self.form.crop, draw[1:3])
        is_flipped = draw[3] < self.form.flip
        frames = self._crop(self.videos.read_frames(video, first, count), box, is_flipped)
        clip = {"video": self._pad(self._resize(frames.movedim(-1, 1), "bicubic"))}
        if self.form.with_masks:
            masks = self._crop(self.videos.read_masks(video, first, count), box, is_flipped)
            clip["masks"] = self._pad(self._resize(masks.unsqueeze(1), "nearest-exact").squeeze(1))
        if self.are_filled:
            clip["is_real"] = torch.arange(self.form.frames) < count
        return clip

    def _crop(self, rows: Array, box: tuple[slice, slice], is_flipped: bool) -> Tensor:
        cropped = rows[(slice(None), *box)]
        return torch.from_numpy(np.array(cropped[:, :, ::-1] if is_flipped else cropped))  # a copy: `rows` is read-only

    def _resize(self, pixels: Tensor, mode: str) -> Tensor:
        side = self.form.size
        if side is None or pixels.shape[2:] == (side, side):
            return pixels.contiguous()
        if mode != "bicubic":
            return F.interpolate(pixels, (side, side), mode=mode)
        return F.interpolate(pixels.float(), (side, side), mode=mode).round().clamp(0, 255).to(torch.uint8)

    def _pad(self, rows: Tensor) -> Tensor:
        short = self.form.frames - len(rows)
        return torch.cat([rows, rows[-1:].expand(short, *rows.shape[1:])]) if short > 0 else rows

    def name_of(self, index: int) -> str:
        video, chunk = self.clips[index]
        name = make_printable(self.videos.videos[video].name)
        return f"{name}, frames from {chunk * self.form.frames}" if self.cut == "all" else name

    def files(self) -> Sequence[Path]:
        return self.videos.files()


def compute_crop_box(size: tuple[int, int], crop: Crop, draw: Sequence[float]) -> tuple[slice, slice]:
    """Return rows and columns of the crop. `draw` holds two numbers in 0..1: the position of a random crop."""
    height, width = size
    if crop == "none":
        return slice(0, height), slice(0, width)
    side = min(size)
    position = draw if crop == "random" else (0.5, 0.5)
    top, left = (round(part * (length - side)) for part, length in zip(position, size, strict=True))
    return slice(top, top + side), slice(left, left + side)


def split_by_length(videos: Videos, members: Sequence[int], frames: int) -> tuple[list[int], list[DataError]]:
    """Return the videos that are long enough for a chunk, and an error for each of the others."""
    short = [index for index in members if videos.videos[index].num_frames < frames]
    errors = [
        DataError(
            f"{videos.videos[index].name} has {format_count(videos.videos[index].num_frames, 'frame')}, "
            f"a chunk {frames}",
            fix=f"data.chunk_size={videos.videos[index].num_frames}, or leave short videos out: data.on_bad_file=skip",
        )
        for index in short
    ]
    return [index for index in members if index not in set(short)], errors


COLOURS = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
"""ImageNet's mean and standard deviation of red, green and blue."""


def describe_surprises(data: VideoDataConfig, clips: ClipData) -> list[str]:
    """Return notes about unexpected properties of the validation videos."""
    notes, found = [], len(clips.val)
    if found and not clips.has_masks:
        notes.append("not all validation videos have masks: there is no FG-ARI, and the loss selects checkpoints")
    return notes


def normalise(pixels: Tensor) -> Tensor:
    """Normalise the colours of frames (B, T, 3, H, W) in 0..1."""
    shape = (1, 1, 3, 1, 1)
    # Create the constants on the device: copying them from the host would synchronise.
    centre, spread = (
        torch.stack([torch.full((), value, device=pixels.device) for value in values]).view(shape) for values in COLOURS
    )
    return (pixels - centre) / spread


def resize_masks(masks: Tensor, side: int) -> Tensor:
    """Resize labels (B, T, h, w) by nearest neighbour to the size at which they are compared."""
    if masks.shape[-2:] == (side, side):
        return masks
    return F.interpolate(masks, (side, side), mode="nearest-exact")


def prepare_masks(batch: Mapping[str, Tensor], data: VideoDataConfig) -> Batch:
    """Return the resized masks of a batch, if it has any."""
    return {"masks": resize_masks(batch["masks"], data.image_size)} if "masks" in batch else {}


def make_whole_clips(samples: ClipSamples) -> ClipSamples:
    """Return the whole videos of training chunks, with masks, to evaluate a folder without a validation split."""
    members = sorted({video for video, _ in samples.clips})
    part = VideoSplit(videos=samples.videos, members=tuple(members))
    longest = max(part.videos.videos[index].num_frames for index in members)
    form = ClipForm(
        frames=longest, size=samples.form.size, crop=choose_steady_crop(samples.form.crop), with_masks=part.have_masks
    )
    return ClipSamples(part.videos, part.members, form, cut="whole")


@dataclass(frozen=True, kw_only=True, slots=True)
class ClipData:
    """Both splits, with facts and notes for the user."""

    train: ClipSamples
    val: ClipSamples
    about: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]
    val_names: tuple[str, ...]
    has_masks: bool


def open_clips(config: VideoDataConfig) -> ClipData:
    """Open the clips of `config.dir`."""
    bad_files = BadFiles(config.on_bad_file)
    found = find_videos(
        config.dir,
        train_shards=config.train_shards,
        val_shards=config.val_shards,
        val_videos=config.val_videos,
        val_fraction=config.val_fraction,
        bad_files=bad_files,
    )
    members, errors = split_by_length(found.train.videos, found.train.members, config.chunk_size)
    for error in errors:
        bad_files.report(error)
    if not members:
        raise DataError(
            "no video is left to train on",
            why=describe_left_out(bad_files),
            fix="fix what was left out, or cut shorter clips: data.chunk_size",
        )
    train_form = ClipForm(
        frames=config.chunk_size, size=_choose_size(config, found.train), crop=config.crop, flip=config.flip
    )
    train = ClipSamples(found.train.videos, members, train_form, cut=config.chunks)
    val_part = found.val or VideoSplit(videos=found.train.videos, members=())
    val = _make_validation(config, val_part)
    return ClipData(
        train=train,
        val=val,
        about=(("layout", found.layout), ("clips", f"{len(train)} to train on, {len(val)} to validate on")),
        notes=bad_files.notes,
        val_names=tuple(val.name_of(index) for index in range(len(val))),
        has_masks=(found.val or found.train).have_masks,
    )


def _make_validation(config: VideoDataConfig, part: VideoSplit) -> ClipSamples:
    """Return validation clips: chunks of `val_chunk_size`, or whole videos."""
    lengths = [part.videos.videos[index].num_frames for index in part.members] or [1]
    wanted = config.val_chunk_size
    form = ClipForm(
        # Chunks are not padded, so the shortest video limits their length.
        frames=min(wanted, *lengths, wanted) if wanted else max(lengths),
        size=_choose_size(config, part),
        crop=choose_steady_crop(config.crop),
        with_masks=part.have_masks,
    )
    return ClipSamples(part.videos, part.members, form, cut="all" if wanted else "whole")


def _choose_size(config: VideoDataConfig, part: VideoSplit) -> int | None:
    """Return None if all frames have the same size and are not cropped: the device then resizes them."""
    sizes = {part.videos.videos[index].size for index in part.members}
    return None if len(sizes) <= 1 and config.crop == "none" else config.image_size


def choose_steady_crop(crop: Crop) -> Crop:
    """Return the crop for validation: a random one becomes the central one."""
    return "none" if crop == "none" else "central"


def to_unit_pixels(video: Tensor, side: int, **resized: Any) -> Tensor:
    """Convert bytes (B, T, 3, h, w) to floats in 0..1 at the model's size; `resized` are options of F.interpolate."""
    frames = video.flatten(0, 1).float().div_(255)
    if frames.shape[-2:] != (side, side):
        frames = F.interpolate(frames, (side, side), **resized).clamp_(0, 1)
    return frames.view(*video.shape[:2], *frames.shape[1:])
