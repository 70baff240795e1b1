"""A family as its author would add it: this folder and one entry in `workloads.KINDS`; nothing else knows of it."""

from halfstep_train.workloads.base.kind import Kind, PredictCommand, SampleUnit, SyntheticData
from new_family.config import AutoencoderConfig

KIND = Kind(
    builder="new_family.build:build",
    config=AutoencoderConfig,
    demo="new_family.demo:write_demo",
    synthetic=SyntheticData(
        store="new_family.demo:random_store", batch="new_family.demo:random_batch", over="new_family.build:over"
    ),
    predict=PredictCommand("new_family.predict:Predictor"),
    sample=SampleUnit(name="picture"),
)
