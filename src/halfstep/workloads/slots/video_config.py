"""Where videos are and how clips are cut from them; shared by the workloads of this family."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from halfstep.config.schema import DataConfig
from halfstep.config.section import Fraction, OffCount, PositiveCount

VIDEO_NAMES = frozenset({"data.train_shards", "data.val_shards", "data.val_videos", "data.val_size"})
"""Settings that speak of the videos of a data folder; the demo writes its own."""


class VideoDataConfig(DataConfig):
    """A folder of videos: tar shards, folders of frames, gif or mp4 files."""

    image_size: PositiveCount = Field(default=128, description="Side of the square frames the model sees, in pixels")
    train_shards: str | tuple[str, ...] = Field(
        default="", description="Tar shards to train on, below data.dir; {000000..000304} stands for a range"
    )
    val_shards: str | tuple[str, ...] = Field(default="", description="Tar shards to validate on")
    val_videos: tuple[str, ...] = Field(
        default=(), description="Videos to validate on, by name pattern; empty: the last ones, by val_fraction"
    )
    chunk_size: PositiveCount = Field(default=3, description="Frames of a training clip")
    chunks: Literal["one", "all"] = Field(
        default="all", description="Clips of a video in an epoch: one at random, or all that do not overlap"
    )
    val_chunk_size: OffCount = Field(
        default=6, description="Frames of a validation clip; longer than a video: its length. 0: whole videos"
    )
    crop: Literal["none", "central", "random"] = Field(
        default="none", description="Square cut from frames that are not square; none: they are squeezed"
    )
    flip: Fraction = Field(default=0.0, description="Chance of a mirrored clip")
