"""Slots of videos by STEVE, and by SlotContrast with words: what they see, without predicting a word."""

from __future__ import annotations

from torch import Tensor, nn

from halfstep.data.loader import Batch
from halfstep.models.steve import Steve
from halfstep.workloads.kind import Store
from halfstep.workloads.slots.build import build_backbone, forward_of, prepare_of
from halfstep.workloads.slots.predict import SlotPredictor
from halfstep.workloads.slots.steve_build import Prepared, model_of
from halfstep.workloads.slots.steve_config import SteveConfig
from halfstep.workloads.slots.words_build import words_model
from halfstep.workloads.slots.words_config import WordsConfig


class StevePredictor(SlotPredictor):
    """One gif, one sheet and one array a video."""

    def __init__(self, config: SteveConfig, store: Store) -> None:
        self.config, self.frozen, self.model = config, {}, model_of(config)
        self._forward, self._prepare = masks_alone, Prepared(config)


class WordsPredictor(SlotPredictor):
    """The same, by the masks of SlotContrast's decoder."""

    def __init__(self, config: WordsConfig, store: Store) -> None:
        backbone = build_backbone(config)
        self.config, self.frozen, self.model = config, {"backbone": backbone}, words_model(config, backbone.module)
        self._forward, self._prepare = forward_of(backbone.module), prepare_of(config)


def masks_alone(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    assert isinstance(model, Steve)
    _, attention = model.steve_encoder(batch["video"], batch["slot_draw"])
    return {"masks": attention.flatten(3)}
