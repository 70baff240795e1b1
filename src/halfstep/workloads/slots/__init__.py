"""Slots: objects in video, found without labels. SlotContrast."""

from functools import partial

from halfstep.workloads.kind import Kind
from halfstep.workloads.slots.config import SlotContrastConfig

HERE = "halfstep.workloads.slots"

slot_kind = partial(
    Kind,
    takes_channels_last=True,
    demo=f"{HERE}.demo:write_demo",
    random_store=f"{HERE}.random_data:random_store",
    random_batch=f"{HERE}.random_data:random_batch",
    evaluation=f"{HERE}.evaluate:SlotEvaluation",
    writes_files=True,
    unit="frame",
    units_per_sample=f"{HERE}.random_data:frames_per_clip",
    sample_size=f"{HERE}.random_data:sample_size",
    task="objects in video",
)
"""What all slot models have in common."""

KIND = slot_kind(
    builder=f"{HERE}.build:build",
    config=SlotContrastConfig,
    over=f"{HERE}.random_data:over",
    predictor=f"{HERE}.predict:SlotPredictor",
    foreign=f"{HERE}.foreign:claim",
    about="objects found without labels: tar shards (NAME.video.npy), folders of frames, .gif or .mp4 files",
    models={"slotcontrast": "slots over frozen DINOv2 features"},
)
