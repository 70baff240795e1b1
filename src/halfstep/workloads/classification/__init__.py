"""Classification: one class for a whole image. ResNets and ViTs."""

from halfstep.workloads.classification.config import CLASSIFIER_SCHEMAS
from halfstep.workloads.kind import Kind

_HERE = "halfstep.workloads.classification"

KIND = Kind(
    builder=f"{_HERE}.build:build",
    schemas=CLASSIFIER_SCHEMAS,
    unit="images",
    demo=f"{_HERE}.demo:write_demo",
    model=f"{_HERE}.build:model_from_store",
    random_store=f"{_HERE}.random_data:random_store",
    random_batch=f"{_HERE}.random_data:random_batch",
    over=f"{_HERE}.random_data:over",
    peer_prepare=f"{_HERE}.random_data:peer_prepare",
    evaluation=f"{_HERE}.evaluate:ClassificationEvaluation",
    predictor=f"{_HERE}.predict:ClassPredictor",
    predict_options=frozenset({"top_k"}),
    guide=f"{_HERE}.guide:GUIDE",
)
