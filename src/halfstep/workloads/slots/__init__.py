"""Slots: objects in video, found without labels. SlotContrast."""

from halfstep.workloads.kind import Kind
from halfstep.workloads.slots.config import SlotContrastConfig

_HERE = "halfstep.workloads.slots"

KIND = Kind(
    builder=f"{_HERE}.build:build",
    config=SlotContrastConfig,
    demo=f"{_HERE}.demo:write_demo",
    random_store=f"{_HERE}.random_data:random_store",
    random_batch=f"{_HERE}.random_data:random_batch",
    over=f"{_HERE}.random_data:over",
    evaluation=f"{_HERE}.evaluate:SlotEvaluation",
    predictor=f"{_HERE}.predict:SlotPredictor",
    writes_files=True,
    foreign=f"{_HERE}.foreign:claim",
    unit="frame",
    units_per_sample=f"{_HERE}.random_data:frames_per_clip",
    sample_size=f"{_HERE}.random_data:sample_size",
    task="objects in video",
    about="objects found without labels: tar shards (NAME.video.npy), folders of frames, .gif or .mp4 files",
    models={"slotcontrast": "slots over frozen DINOv2 features"},
)
