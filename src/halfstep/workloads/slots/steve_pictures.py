"""What STEVE makes of a clip: the frames, the VAE's own image of them, and the image that slots alone bring back."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from halfstep.data.clips import ClipSamples
from halfstep.islands import to_fp32
from halfstep.models.steve import Steve
from halfstep.workloads.slots.pictures import clip_views, sheet
from halfstep.workloads.workload import Forward, Prepare, Sample

Array = np.ndarray[Any, Any]

IMAGINED_FRAMES = 3
"""Of the first clip: each is a word after a word."""


def sample_of(samples: ClipSamples, prepare: Prepare, forward: Forward) -> Sample | None:
    """Pictures of the first validation clip, for the report while training."""
    if len(samples) == 0:
        return None

    def sample(model: nn.Module, key: tuple[int, ...]) -> dict[str, Array]:
        assert isinstance(model, Steve)
        device = next(model.parameters()).device
        raw = {name: value.unsqueeze(0).to(device) for name, value in samples.sample(0, key=(0, 0, 0)).items()}
        with torch.no_grad():
            prepared = prepare(raw, key=key, training=False)
            outputs = forward(model, prepared)
            shown = slice(0, IMAGINED_FRAMES)
            rows = [prepared["video"][0, shown], outputs["reconstruction"][0, shown]]
            rows.append(model.imagined(outputs["slots"][0, shown]))
        frames, slots, truth = clip_views(raw, outputs)
        return {"clip_0": sheet(frames, slots, truth), "frames_vae_slots": page(rows)}

    return sample


def page(rows: list[Tensor]) -> Array:
    """Rows of images (N, 3, H, W) in 0…1 below each other."""
    lines = [torch.cat(list(to_fp32(row).clamp(0, 1)), dim=2) for row in rows]
    pixels = (torch.cat(lines, dim=1) * 255).round().to(torch.uint8)
    found: Array = pixels.permute(1, 2, 0).cpu().numpy()
    return found
