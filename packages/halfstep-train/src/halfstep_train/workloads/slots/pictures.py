"""Draw slots: frames, true masks and slot masks as a sheet or a gif.

Slot k has the same colour in every frame, clip and run: if a colour jumps to another object, so does the slot.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from halfstep.islands import to_fp32
from halfstep_train.data.seeds import Key
from halfstep_train.workloads.base.sheets import Array, arrange_grid
from halfstep_train.workloads.base.workload import Forward, Prepare, Sample
from halfstep_train.workloads.segmentation.pictures import CLASS_COLOURS
from halfstep_train.workloads.slots.data import ClipSamples
from halfstep_train.workloads.slots.scores import label_pixels
from halfstep_train.workloads.slots.steve import Steve

SHOWN_FRAMES = 6
"""Frames per clip in a sheet."""
SAMPLED_CLIPS = 2
"""Validation clips that are drawn during training."""
MS_PER_FRAME = 120
GIF_SIDE = 512
"""Longest side of a frame in a gif, in pixels."""


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
    height, width = frames.shape[1:3]
    scale = min(1.0, GIF_SIDE / max(height, width))
    # Nearest-neighbour indices: labels cannot be interpolated.
    down, across = (
        np.arange(max(1, round(side * scale))) * side // max(1, round(side * scale)) for side in (height, width)
    )
    pictures = []
    for frame, labels in zip(frames, slots, strict=True):
        frame = np.asarray(Image.fromarray(frame).resize((len(across), len(down))))
        pair = [frame, tint(frame, colour_slots(labels[down[:, None], across]))]
        pictures.append(Image.fromarray(np.concatenate(pair, axis=1)))
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
                    found["frames_vae_slots"] = draw_rows([*rows, model.decode_slots(outputs["slots"][0, shown])])
        return found

    return sample


def draw_rows(rows: list[Tensor]) -> Array:
    """Stack rows of images (N, 3, H, W) in 0..1 into one image."""
    lines = [torch.cat(list(to_fp32(row).clamp(0, 1)), dim=2) for row in rows]
    pixels = (torch.cat(lines, dim=1) * 255).round().to(torch.uint8)
    return pixels.permute(1, 2, 0).cpu().numpy()
