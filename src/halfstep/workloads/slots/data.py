"""Clips as SlotContrast sees them: normalised as upstream does, masks at the size they are compared at."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from halfstep.data.clips import ClipForm, ClipSamples
from halfstep.data.loader import Batch
from halfstep.data.video_layouts import VideoPart
from halfstep.errors import counted
from halfstep.workloads.slots.clip_data import ClipData, steady
from halfstep.workloads.slots.config import SlotVideoConfig

COLOURS = {
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "half": ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
}
"""Mean and deviation of red, green and blue."""


def notes_on(data: SlotVideoConfig, clips: ClipData) -> list[str]:
    """What a user may not expect of the validation videos."""
    notes, found = [], len(clips.val)
    if data.val_size and data.val_size != found:
        notes.append(f"data.val_size is {data.val_size}, but there are {counted(found, 'validation clip')}")
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
