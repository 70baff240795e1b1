"""Segmentation: one class per pixel, with a U-Net."""

from halfstep_train.workloads.base.kind import (
    EvaluateCommand,
    ExportCommand,
    GuideEntry,
    Kind,
    Option,
    PredictCommand,
    SampleUnit,
    describe_pixels,
)
from halfstep_train.workloads.segmentation.config import UNetConfig

KIND = Kind.from_package(
    __name__,
    config=UNetConfig,
    kept=("model.classes", "model.ignore_index", "data.channels", "data.scale"),
    task="segmentation",
    export_command=ExportCommand("image", ".build:describe_export"),
    hint=".scores:hint_at_single_class",
    sample=SampleUnit(name="image", size=describe_pixels),
    evaluate=EvaluateCommand(
        ".evaluate:SegmentationEvaluation",
        (Option("full_size", bool, False, "Score masks at the original size of each image, as predict writes them"),),
    ),
    predict=PredictCommand(
        ".evaluate:MaskPredictor",
        (Option("tile", int, None, "Largest side computed at once, in pixels; default: 1024", least=1),),
        writes_files=True,
    ),
    guide=GuideEntry(
        about="one class per pixel: imgs/<id>.png, masks/<id>_mask.png", models={"unet": "31 M parameters"}
    ),
)
