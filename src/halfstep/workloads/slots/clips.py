"""Clips cut from videos as samples: each a pure function of (seed, epoch, index).

Training takes chunks of a few frames, aligned to their length: one at random from each video and epoch, or all of them.
Validation takes whole videos; shorter ones are filled up with their last frame, and `is_real` says which frames count.
Frames keep the size of their files where all videos share one, since the device resizes faster; otherwise they are
brought to one size here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from halfstep.data.seeds import generator_for
from halfstep.errors import DataError, format_count, make_printable
from halfstep.workloads.slots.videos import Array, Videos

Crop = Literal["none", "central", "random"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ClipForm:
    """What becomes of the frames of a clip before they are batched."""

    frames: int
    """Frames of a clip; shorter videos are filled up."""
    size: int | None = None
    """Side that frames are brought to; None: all have one size, and keep it."""
    crop: Crop = "none"
    """A square as large as the shorter side, in the middle or anywhere; none: the whole frame, squeezed."""
    flip: float = 0.0
    with_masks: bool = False


class ClipSamples:
    """Clips of some of the videos of a set."""

    def __init__(
        self, videos: Videos, members: Sequence[int], form: ClipForm, *, cut: Literal["one", "all", "whole"]
    ) -> None:
        self.videos, self.form, self.cut = videos, form, cut
        per_video = {index: videos.videos[index].num_frames // form.frames for index in members}
        self.places = [(index, chunk) for index in members for chunk in range(per_video[index] if cut == "all" else 1)]
        self._chunks = per_video
        lengths = {videos.videos[index].num_frames for index in members}
        self.are_filled = cut == "whole" and any(length < form.frames for length in lengths)

    def __len__(self) -> int:
        return len(self.places)

    def sample(self, index: int, *, key: tuple[int, int, int]) -> dict[str, Tensor]:
        video, chunk = self.places[index]
        draw = torch.rand(4, generator=generator_for(*key), dtype=torch.float64).tolist()
        if self.cut == "one":
            chunk = int(draw[0] * self._chunks[video])
        first = chunk * self.form.frames
        count = min(self.form.frames, self.videos.videos[video].num_frames - first)
        box = crop_box(self.videos.videos[video].size, self.form.crop, draw[1:3])
        is_flipped = draw[3] < self.form.flip
        frames = self._cut(self.videos.frames(video, first, count), box, is_flipped)
        clip = {"video": self._filled(self._sized(frames.movedim(-1, 1), "bicubic"))}
        if self.form.with_masks:
            masks = self._cut(self.videos.masks(video, first, count), box, is_flipped)
            clip["masks"] = self._filled(self._sized(masks.unsqueeze(1), "nearest-exact").squeeze(1))
        if self.are_filled:
            clip["is_real"] = torch.arange(self.form.frames) < count
        return clip

    def _cut(self, rows: Array, box: tuple[slice, slice], is_flipped: bool) -> Tensor:
        cut = rows[(slice(None), *box)]
        return torch.from_numpy(np.array(cut[:, :, ::-1] if is_flipped else cut))  # a copy: what was read is read-only

    def _sized(self, pixels: Tensor, mode: str) -> Tensor:
        side = self.form.size
        if side is None or pixels.shape[2:] == (side, side):
            return pixels.contiguous()
        if mode != "bicubic":
            return F.interpolate(pixels, (side, side), mode=mode)
        return F.interpolate(pixels.float(), (side, side), mode=mode).round().clamp(0, 255).to(torch.uint8)

    def _filled(self, rows: Tensor) -> Tensor:
        short = self.form.frames - len(rows)
        return torch.cat([rows, rows[-1:].expand(short, *rows.shape[1:])]) if short > 0 else rows

    def name_of(self, index: int) -> str:
        video, chunk = self.places[index]
        name = make_printable(self.videos.videos[video].name)
        return f"{name}, frames from {chunk * self.form.frames}" if self.cut == "all" else name

    def files(self) -> Sequence[Path]:
        return self.videos.files()


def crop_box(size: tuple[int, int], crop: Crop, draw: Sequence[float]) -> tuple[slice, slice]:
    """Rows and columns of the crop; `draw` places a random one."""
    height, width = size
    if crop == "none":
        return slice(0, height), slice(0, width)
    side = min(size)
    at = draw if crop == "random" else (0.5, 0.5)
    top, left = (round(place * (length - side)) for place, length in zip(at, size, strict=True))
    return slice(top, top + side), slice(left, left + side)


def long_enough(videos: Videos, members: Sequence[int], frames: int) -> tuple[list[int], list[DataError]]:
    """The videos that hold a chunk, and what is wrong with the others."""
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
