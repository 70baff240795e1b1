"""`halfstep guide` for objects in video."""

from __future__ import annotations

from typing import ClassVar

from PIL import Image
from torch import Tensor

from halfstep_train.workloads.base.guiding import Guiding, OpenedData
from halfstep_train.workloads.slots.config import SlotContrastConfig, SteveConfig
from halfstep_train.workloads.slots.data import open_clips


class SteveGuide(Guiding):
    """Guide to STEVE, which trains from scratch."""

    small_on_cpu = {
        "data.image_size": 64,
        "model.vocabulary": 512,
        "model.slot_dim": 64,
        "model.cnn_channels": 32,
        "model.dim": 64,
        "model.decoder_blocks": 4,
    }
    remarks: ClassVar[tuple[tuple[str, str], ...]] = ()

    def open(self, config: SteveConfig | SlotContrastConfig) -> OpenedData:
        clips = open_clips(config.data)
        height, width = clips.train.videos[0].size
        form = f"{config.data.chunk_size} frames; the first video has {width}×{height} pixels"
        masks = "masks to score with" if clips.store["has_masks"] else "no masks: only the loss is validated"
        return OpenedData(
            train=clips.train,
            val=clips.val,
            store=clips.store,
            classes=(),
            about=(*clips.about, ("a clip", f"{form}; {masks}")),
            notes=clips.notes,
            remarks=self.remarks,
        )

    def draw_sample(self, sample: dict[str, Tensor], index: int, classes: tuple[str, ...]) -> tuple[str, Image.Image]:
        """Draw the middle frame of a clip."""
        frame = sample["video"][len(sample["video"]) // 2]
        return f"clip {index}", Image.fromarray(frame.movedim(0, -1).contiguous().numpy())


class Guide(SteveGuide):
    """Guide to SlotContrast, whose features come from a frozen backbone."""

    small_on_cpu = {
        "data.image_size": 64,
        "model.backbone": "filters",
        "model.patch": 8,
        "model.slot_dim": 32,
        "model.decoder_hidden": (128, 128),
    }
    remarks: ClassVar[tuple[tuple[str, str], ...]] = (
        (
            "backbone",
            "a DINOv2 backbone needs model.backbone_weights=FILE when you train (halfstep downloads nothing); "
            "model.backbone=filters needs no file, and is for demos",
        ),
    )
