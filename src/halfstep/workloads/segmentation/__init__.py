"""Segmentation: a class for every pixel. U-Net."""

from halfstep.workloads.kind import Kind
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
    evaluate_options=frozenset({"full_size"}),
    predictor=f"{_HERE}.predict:MaskPredictor",
    predict_options=frozenset({"out", "tile"}),
    hint=f"{_HERE}.scores:one_class_everywhere",
    guide=f"{_HERE}.guide:Guide",
    task="segmentation",
    about="a class a pixel: imgs/<id>.png, masks/<id>_mask.png",
    models={"unet": "31 M parameters"},
)
