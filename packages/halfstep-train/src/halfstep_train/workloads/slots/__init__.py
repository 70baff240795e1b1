"""Slots: find objects in video without labels, with SlotContrast, STEVE, or both (slots that also predict words)."""

from dataclasses import replace
from functools import partial

from halfstep_train.workloads.base.kind import SYNTHETIC, EvaluateCommand, GuideEntry, Kind, PredictCommand, SampleUnit
from halfstep_train.workloads.slots.config import SlotContrastConfig, SteveConfig, WordsConfig

_GUIDE = GuideEntry(
    about="find and follow objects without labels: videos as folders of frames, gif, mp4 or tar shards",
    models={
        "steve": "from scratch: a discrete VAE, and slots that predict its words",
        "slotcontrast": "slots over the features of DINOv2, whose weights you give as a file",
        "slotcontrast_steve": "both: slots over DINOv2 that also predict words",
    },
    usual_on_cpu="steve",
)

slot_kind = partial(
    Kind.from_package,
    __name__,
    task="objects in video",
    usual="steve",
    guide=_GUIDE,
    sample=SampleUnit(name="frame", per_sample=".build:get_frames_per_clip", size=".build:describe_size"),
    evaluate=EvaluateCommand(".evaluate:SlotEvaluation"),
)
"""Arguments that all slot models share."""

KIND = slot_kind(
    config=SlotContrastConfig,
    foreign=".foreign:translate_config",
    predict=PredictCommand(".evaluate:SlotPredictor", writes_files=True),
)

STEVE = slot_kind(
    builder=".build:build_steve",
    guide=replace(_GUIDE, guide=".build:SteveGuide"),
    config=SteveConfig,
    synthetic=replace(SYNTHETIC, over=".build:build_steve_on_samples"),
    predict=PredictCommand(".evaluate:StevePredictor", writes_files=True),
)

WITH_WORDS = slot_kind(
    builder=".build:build_with_words",
    config=WordsConfig,
    synthetic=replace(SYNTHETIC, over=".build:build_with_words_on_samples"),
    predict=PredictCommand(".evaluate:SlotPredictor", writes_files=True),
)
