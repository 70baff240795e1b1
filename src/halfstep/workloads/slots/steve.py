"""STEVE, alone and beside SlotContrast: each frame's words predicted from its slots."""

from halfstep.workloads.slots import HERE, slot_kind
from halfstep.workloads.slots.steve_config import SteveConfig
from halfstep.workloads.slots.words_config import WordsConfig

KIND = slot_kind(
    builder=f"{HERE}.steve_build:build",
    config=SteveConfig,
    over=f"{HERE}.steve_build:over",
    predictor=f"{HERE}.steve_predict:StevePredictor",
    models={"steve": "slots that predict the words of a discrete VAE"},
)

WITH_SLOTCONTRAST = slot_kind(
    builder=f"{HERE}.words_build:build",
    config=WordsConfig,
    over=f"{HERE}.words_build:over",
    predictor=f"{HERE}.steve_predict:WordsPredictor",
    models={"slotcontrast_steve": "both: slots over frozen features, which also predict words"},
)
