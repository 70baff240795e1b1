"""Segmentation: a class for every pixel. U-Net."""

from halfstep.workloads.base.kind import Kind
from halfstep.workloads.base.options import Option
from halfstep.workloads.segmentation.config import UNetConfig

KIND = Kind.in_folder(
    __name__,
    config=UNetConfig,
    kept=("model.classes", "model.ignore_index", "data.channels", "data.scale"),
    evaluation=".evaluate:SegmentationEvaluation",
    evaluate_options=(
        Option("full_size", bool, False, "Score masks at each image's own size, as predict writes them"),
    ),
    predictor=".predict:MaskPredictor",
    predict_options=(Option("tile", int, None, "Largest side computed at once, in pixels; default: 1024", least=1),),
    writes_files=True,
    hint=".scores:one_class_everywhere",
    unit="image",
    sample_size=lambda config: f"{config.data.image_size} pixels",
    task="segmentation",
    about="a class a pixel: imgs/<id>.png, masks/<id>_mask.png",
    models={"unet": "31 M parameters"},
)
