"""Segmentation: a class for every pixel. U-Net."""

from halfstep.workloads.kind import Kind
from halfstep.workloads.options import Option
from halfstep.workloads.segmentation.config import UNetConfig

_HERE = "halfstep.workloads.segmentation"

KIND = Kind(
    builder=f"{_HERE}.build:build",
    config=UNetConfig,
    demo=f"{_HERE}.demo:write_demo",
    random_store=f"{_HERE}.random_data:random_store",
    random_batch=f"{_HERE}.random_data:random_batch",
    over=f"{_HERE}.random_data:over",
    evaluation=f"{_HERE}.evaluate:SegmentationEvaluation",
    evaluate_options=(
        Option("full_size", bool, False, "Score masks at each image's own size, as predict writes them"),
    ),
    predictor=f"{_HERE}.predict:MaskPredictor",
    predict_options=(Option("tile", int, None, "Largest side computed at once, in pixels; 1024", least=1),),
    writes_files=True,
    hint=f"{_HERE}.scores:one_class_everywhere",
    guide=f"{_HERE}.guide:Guide",
    unit="image",
    sample_size=lambda config: f"{config.data.image_size} pixels",
    task="segmentation",
    about="a class a pixel: imgs/<id>.png, masks/<id>_mask.png",
    models={"unet": "31 M parameters"},
)
