"""Segmentation: a class for every pixel. U-Net."""

from halfstep.workloads.base.kind import EvaluateCommand, GuideEntry, Kind, Option, PredictCommand, SampleUnit
from halfstep.workloads.segmentation.config import UNetConfig

KIND = Kind.from_package(
    __name__,
    config=UNetConfig,
    kept=("model.classes", "model.ignore_index", "data.channels", "data.scale"),
    task="segmentation",
    hint=".scores:one_class_everywhere",
    sample=SampleUnit(name="image", size=lambda config: f"{config.data.image_size} pixels"),
    evaluate=EvaluateCommand(
        ".evaluate:SegmentationEvaluation",
        (Option("full_size", bool, False, "Score masks at each image's own size, as predict writes them"),),
    ),
    predict=PredictCommand(
        ".predict:MaskPredictor",
        (Option("tile", int, None, "Largest side computed at once, in pixels; default: 1024", least=1),),
        writes_files=True,
    ),
    guide=GuideEntry(
        about="one class per pixel: imgs/<id>.png, masks/<id>_mask.png", models={"unet": "31 M parameters"}
    ),
)
