"""STEVE, alone and beside SlotContrast: each frame's words predicted from its slots."""

from halfstep.workloads.kind import Kind
from halfstep.workloads.slots.steve_config import SteveConfig
from halfstep.workloads.slots.words_config import WordsConfig

_HERE = "halfstep.workloads.slots"
_TASK = "objects in video"

KIND = Kind(
    builder=f"{_HERE}.steve_build:build",
    config=SteveConfig,
    demo=f"{_HERE}.demo:write_demo",
    random_store=f"{_HERE}.random_data:random_store",
    random_batch=f"{_HERE}.random_data:random_batch",
    over=f"{_HERE}.steve_build:over",
    evaluation=f"{_HERE}.evaluate:SlotEvaluation",
    predictor=f"{_HERE}.steve_predict:StevePredictor",
    writes_files=True,
    unit="frame",
    units_per_sample=f"{_HERE}.random_data:frames_per_clip",
    sample_size=f"{_HERE}.random_data:sample_size",
    task=_TASK,
    models={"steve": "slots that predict the words of a discrete VAE"},
)

WITH_SLOTCONTRAST = Kind(
    builder=f"{_HERE}.words_build:build",
    config=WordsConfig,
    demo=f"{_HERE}.demo:write_demo",
    random_store=f"{_HERE}.random_data:random_store",
    random_batch=f"{_HERE}.random_data:random_batch",
    over=f"{_HERE}.words_build:over",
    evaluation=f"{_HERE}.evaluate:SlotEvaluation",
    predictor=f"{_HERE}.steve_predict:WordsPredictor",
    writes_files=True,
    unit="frame",
    units_per_sample=f"{_HERE}.random_data:frames_per_clip",
    sample_size=f"{_HERE}.random_data:sample_size",
    task=_TASK,
    models={"slotcontrast_steve": "both: slots over frozen features, which also predict words"},
)
