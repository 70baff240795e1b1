"""Slots: objects in video, found without labels. SlotContrast, STEVE, and both: slots that also predict words."""

from functools import partial

from halfstep.workloads.base.kind import Kind
from halfstep.workloads.slots.config import SlotContrastConfig, SteveConfig, WordsConfig

slot_kind = partial(
    Kind.in_folder,
    __name__,
    evaluation=".evaluate:SlotEvaluation",
    guide=None,
    writes_files=True,
    unit="frame",
    units_per_sample=".build:frames_per_clip",
    sample_size=".build:sample_size",
    task="objects in video",
)
"""What all slot models have in common."""

KIND = slot_kind(
    config=SlotContrastConfig,
    predictor=".predict:SlotPredictor",
    foreign=".foreign:claim",
    about="objects found without labels: tar shards (NAME.video.npy), folders of frames, .gif or .mp4 files",
    models={"slotcontrast": "slots over frozen DINOv2 features"},
)

STEVE = slot_kind(
    builder=".steve_build:build",
    config=SteveConfig,
    over=".steve_build:over",
    predictor=".predict:StevePredictor",
    models={"steve": "slots that predict the words of a discrete VAE"},
)

WITH_WORDS = slot_kind(
    builder=".steve_build:build_with_words",
    config=WordsConfig,
    over=".steve_build:over_with_words",
    predictor=".predict:WordsPredictor",
    models={"slotcontrast_steve": "both: slots over frozen features, which also predict words"},
)
