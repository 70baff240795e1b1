"""Clips cut from videos as samples: each a pure function of (seed, epoch, index).

Training uses chunks of a few frames that start at multiples of their length: one at random per video and epoch, or all
of them. Validation uses whole videos; shorter ones are padded with their last frame, and `is_real` marks the frames
that count. Frames keep their size if all videos have the same one, since the device resizes faster; otherwise they
are resized here. Colours are normalised as upstream does; masks are resized to the size at which they are compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F

from halfstep.errors import DataError, format_count, make_printable
from halfstep.islands import to_fp32
from halfstep_train.data.files import Array, BadFiles
from halfstep_train.data.loader import Batch, Key, make_generator
from halfstep_train.models.patch_gan import IMAGENET_MEAN, IMAGENET_STD
from halfstep_train.workloads.base.sheets import arrange_grid
from halfstep_train.workloads.base.workload import Forward, OpenedData, Prepare, Sample
from halfstep_train.workloads.segmentation.pictures import CLASS_COLOURS
from halfstep_train.workloads.slots.config import VideoDataConfig
from halfstep_train.workloads.slots.scores import label_pixels
from halfstep_train.workloads.slots.steve import Steve
from halfstep_train.workloads.slots.videos import Video, find_videos

Crop = Literal["none", "central", "random"]


class ClipSamples:
    """Clips from videos: one random chunk per video, all chunks, or whole videos."""

    def __init__(
        self,
        videos: Sequence[Video],
        *,
        cut: Literal["one", "all", "whole"],
        frames: int,
        size: int | None = None,
        crop: Crop = "none",
        flip: float = 0.0,
        with_masks: bool = False,
    ) -> None:
        """Cut clips of `frames` frames; shorter videos are padded.

        `size` is the side that frames are resized to; None: all videos share a size and keep it. `crop` cuts a square
        as large as the shorter side, in the centre or at random; none: the whole frame is distorted to a square.
        """
        self.videos, self.cut, self.frames, self.size, self.crop = videos, cut, frames, size, crop
        self.flip, self.with_masks = flip, with_masks
        # (video, chunk) of each clip; with cut="one" the chunk is drawn in `sample`.
        self.clips = [
            (video, chunk) for video in videos for chunk in range(video.num_frames // frames if cut == "all" else 1)
        ]
        self.are_filled = cut == "whole" and any(video.num_frames < frames for video in videos)

    def __len__(self) -> int:
        return len(self.clips)

    def sample(self, index: int, *, key: tuple[int, int, int]) -> dict[str, Tensor]:
        video, chunk = self.clips[index]
        # Four numbers per sample: the chunk, the position of the crop (vertical, horizontal), and the flip.
        draw = torch.rand(4, generator=make_generator(*key), dtype=torch.float64).tolist()
        if self.cut == "one":
            chunk = int(draw[0] * (video.num_frames // self.frames))
        first = chunk * self.frames
        count = min(self.frames, video.num_frames - first)
        box = compute_crop_box(video.size, self.crop, draw[1:3])
        is_flipped = draw[3] < self.flip
        frames = self._crop(video.read_frames(first, count), box, is_flipped)
        clip = {"video": self._pad(self._resize(frames.movedim(-1, 1), "bicubic"))}
        if self.with_masks:
            masks = self._crop(video.read_masks(first, count), box, is_flipped)
            clip["masks"] = self._pad(self._resize(masks.unsqueeze(1), "nearest-exact").squeeze(1))
        if self.are_filled:
            clip["is_real"] = torch.arange(self.frames) < count
        return clip

    def _crop(self, rows: Array, box: tuple[slice, slice], is_flipped: bool) -> Tensor:
        cropped = rows[(slice(None), *box)]
        return torch.from_numpy(np.array(cropped[:, :, ::-1] if is_flipped else cropped))  # a copy: `rows` is read-only

    def _resize(self, pixels: Tensor, mode: str) -> Tensor:
        side = self.size
        if side is None or pixels.shape[2:] == (side, side):
            return pixels.contiguous()
        if mode != "bicubic":
            return F.interpolate(pixels, (side, side), mode=mode)
        return F.interpolate(pixels.float(), (side, side), mode=mode).round().clamp(0, 255).to(torch.uint8)

    def _pad(self, rows: Tensor) -> Tensor:
        short = self.frames - len(rows)
        return torch.cat([rows, rows[-1:].expand(short, *rows.shape[1:])]) if short > 0 else rows

    def name_of(self, index: int) -> str:
        video, chunk = self.clips[index]
        name = make_printable(video.name)
        return f"{name}, frames from {chunk * self.frames}" if self.cut == "all" else name

    def files(self) -> Sequence[Path]:
        return list(dict.fromkeys(path for video in self.videos for path in video.paths))


def compute_crop_box(size: tuple[int, int], crop: Crop, draw: Sequence[float]) -> tuple[slice, slice]:
    """Return rows and columns of the crop. `draw` holds two numbers in 0..1: the position of a random crop."""
    height, width = size
    if crop == "none":
        return slice(0, height), slice(0, width)
    side = min(size)
    position = draw if crop == "random" else (0.5, 0.5)
    top, left = (round(part * (length - side)) for part, length in zip(position, size, strict=True))
    return slice(top, top + side), slice(left, left + side)


def normalise(pixels: Tensor) -> Tensor:
    """Normalise the colours of frames (B, T, 3, H, W) in 0..1."""
    shape = (1, 1, 3, 1, 1)
    # Create the constants on the device: copying them from the host would synchronise.
    centre, spread = (
        torch.stack([torch.full((), value, device=pixels.device) for value in values]).view(shape)
        for values in (IMAGENET_MEAN, IMAGENET_STD)
    )
    return (pixels - centre) / spread


def prepare_masks(batch: Mapping[str, Tensor], side: int) -> Batch:
    """Return the masks of a batch, if any, resized to the side in pixels at which they are compared."""
    return {"masks": F.interpolate(batch["masks"], (side, side), mode="nearest-exact")} if "masks" in batch else {}


def to_unit_pixels(video: Tensor, side: int, **resized: Any) -> Tensor:
    """Convert bytes (B, T, 3, h, w) to floats in 0..1 at the model's size; `resized` are options of F.interpolate."""
    frames = video.flatten(0, 1).float().div_(255)
    if frames.shape[-2:] != (side, side):
        frames = F.interpolate(frames, (side, side), **resized).clamp_(0, 1)
    return frames.view(*video.shape[:2], *frames.shape[1:])


def open_clips(config: VideoDataConfig) -> OpenedData:
    """Open the clips of `config.dir`. The store holds facts about the masks of validation videos, which choose the
    scores."""
    bad_files = BadFiles(config.on_bad_file)
    found = find_videos(config, bad_files)
    videos = [video for video in found.train if video.num_frames >= config.chunk_size]
    for video in found.train:
        if video.num_frames < config.chunk_size:
            what = f"{video.name} has {format_count(video.num_frames, 'frame')}, but a chunk has {config.chunk_size}"
            fix = f"data.chunk_size={video.num_frames}, or leave short videos out: data.on_bad_file=skip"
            bad_files.report(DataError(what, fix=fix))
    bad_files.refuse_empty_split("training", len(found.train), len(videos))
    train = ClipSamples(
        videos,
        cut=config.chunks,
        frames=config.chunk_size,
        size=_choose_size(config, found.train),
        crop=config.crop,
        flip=config.flip,
    )
    # Chunks are not padded, so the shortest video limits their length.
    shortest = min((video.num_frames for video in found.val), default=1)
    val = make_steady_clips(
        found.val,
        size=_choose_size(config, found.val),
        crop=config.crop,
        chunk=min(config.val_chunk_size, shortest),
    )
    scored = found.val or found.train
    return OpenedData(
        train=train,
        val=val,
        about=(("layout", found.layout), ("clips", f"{len(train)} to train on, {len(val)} to validate on")),
        notes=bad_files.notes,
        store={
            "background_is_labelled": all(video.labels_background for video in scored),
            "has_masks": all(video.has_masks for video in scored),
        },
    )


def make_steady_clips(videos: Sequence[Video], *, size: int | None, crop: Crop, chunk: int = 0) -> ClipSamples:
    """Return clips to evaluate, with masks if all videos have them: all chunks, or without a `chunk` whole videos."""
    return ClipSamples(
        videos,
        cut="all" if chunk else "whole",
        frames=chunk or max((video.num_frames for video in videos), default=1),
        size=size,
        crop=choose_steady_crop(crop),
        with_masks=all(video.has_masks for video in videos),
    )


def _choose_size(config: VideoDataConfig, videos: Sequence[Video]) -> int | None:
    """Return None if all frames have the same size and are not cropped: the device then resizes them."""
    return None if len({video.size for video in videos}) <= 1 and config.crop == "none" else config.image_size


def choose_steady_crop(crop: Crop) -> Crop:
    """Return the crop for validation: a random one becomes the central one."""
    return "none" if crop == "none" else "central"


# --- pictures ---
#
# Slot k has the same colour in every frame, clip and run: if a colour jumps to another object, so does the slot.


SHOWN_FRAMES = 6
"""Frames per clip in a sheet."""
SAMPLED_CLIPS = 2
"""Validation clips that are drawn during training."""
MS_PER_FRAME, GIF_SIDE = 120, 512
"""Duration and longest side, in pixels, of a frame in a gif."""


def colour_slots(labels: Array) -> Array:
    """Return the colours (..., 3) uint8 of slot numbers."""
    return CLASS_COLOURS[labels.astype(np.int64) % len(CLASS_COLOURS)]


def colour_objects(labels: Array) -> Array:
    """Return the colours (..., 3) uint8 of true objects; background is black."""
    return np.where(labels[..., None] > 0, colour_slots(np.maximum(labels.astype(np.int64) - 1, 0)), 0).astype(np.uint8)


def tint(frames: Array, colours: Array) -> Array:
    """Blend frames (..., 3) uint8 with the colours of their slots."""
    return (frames * 0.45 + colours * 0.55).round().astype(np.uint8)


def draw_sheet(frames: Array, slots: Array, truth: Array | None) -> Array:
    """Draw a few frames in rows: plain, tinted by slots, slots only, and true objects if known."""
    shown = min(len(frames), SHOWN_FRAMES)
    picked = [round(k * (len(frames) - 1) / max(shown - 1, 1)) for k in range(shown)]  # over the whole clip
    colours = colour_slots(slots[picked])
    rows = [frames[picked], tint(frames[picked], colours), colours]
    rows += [colour_objects(truth[picked])] if truth is not None else []
    return arrange_grid(np.concatenate(rows), columns=len(picked), gap=4)


def write_gif(path: Path, frames: Array, slots: Array) -> None:
    """Write frames and their slots side by side as a gif. Large frames are shrunk: computing a palette takes long."""
    pairs = np.concatenate([frames, tint(frames, colour_slots(slots))], axis=2)
    pictures = [Image.fromarray(pair) for pair in pairs]
    for picture in pictures:
        picture.thumbnail((2 * GIF_SIDE, GIF_SIDE))
    pictures[0].save(path, save_all=True, append_images=pictures[1:], duration=MS_PER_FRAME, loop=0)


def to_frames(video: Tensor, size: tuple[int, int]) -> Array:
    """Convert loaded bytes (T, 3, h, w) to frames (T, H, W, 3) of a given size."""
    frames = np.moveaxis(video.cpu().numpy(), 1, -1)
    if frames.shape[1:3] == size:
        return frames
    return np.stack([np.asarray(Image.fromarray(frame).resize((size[1], size[0]))) for frame in frames])


def make_views(raw: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> tuple[Array, Array, Array | None]:
    """Return frames, slots and true labels of a batch of one, at the size of the frames and without padding."""
    count = int(raw["is_real"][0].sum()) if "is_real" in raw else raw["video"].shape[1]
    video = raw["video"][0, :count]
    size = (video.shape[-2], video.shape[-1])
    slots = label_pixels(outputs["masks"][:, :count], size)[0].cpu().numpy()
    truth = raw["masks"][0, :count].cpu().numpy() if "masks" in raw else None
    return to_frames(video, size), slots, truth


DECODED_FRAMES = 3
"""Frames of the first clip that STEVE decodes from slots; slow, since each is decoded word by word."""


def make_sampler(samples: ClipSamples, prepare: Prepare, forward: Forward) -> Sample | None:
    """Return a function that draws the first validation clips during training; None if there are none.

    STEVE also draws frames of the first clip as reconstructed by its VAE, and as decoded from slots."""
    if len(samples) == 0:
        return None

    def sample(model: nn.Module, key: Key) -> dict[str, Array]:
        device = next(model.parameters()).device
        found = {}
        for index in range(min(SAMPLED_CLIPS, len(samples))):
            loaded = samples.sample(index, key=(0, 0, index))
            raw = {name: value.unsqueeze(0).to(device) for name, value in loaded.items()}
            with torch.no_grad():
                prepared = prepare(raw, key=key, training=False)
                outputs = forward(model, prepared)
                found[f"clip_{index}"] = draw_sheet(*make_views(raw, outputs))
                if isinstance(model, Steve) and index == 0:
                    shown = slice(0, DECODED_FRAMES)
                    rows = [prepared["video"][0, shown], outputs["reconstruction"][0, shown]]
                    images = torch.cat([*rows, model.decode_slots(outputs["slots"][0, shown])])
                    pixels = (to_fp32(images).clamp(0, 1) * 255).round().to(torch.uint8).permute(0, 2, 3, 1)
                    found["frames_vae_slots"] = arrange_grid(pixels.cpu().numpy(), columns=len(rows[0]), gap=0)
        return found

    return sample
