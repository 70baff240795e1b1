"""SlotContrast with words: its workload, and what the words add to model, batch, loss and schedule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from halfstep.data.loader import Batch, Samples
from halfstep.models.slotcontrast import SlotContrastSize, from_upstream
from halfstep.models.slotcontrast_words import SlotContrastWords, WordsSize
from halfstep.models.weights import load_weights_, read_weights
from halfstep.workloads.kind import Store
from halfstep.workloads.scheduled import Scheduled
from halfstep.workloads.slots import build as slots
from halfstep.workloads.slots import random_data
from halfstep.workloads.slots.steve_loss import settled_scale, temperature
from halfstep.workloads.slots.word_draws import word_keys
from halfstep.workloads.slots.words_config import WordsConfig
from halfstep.workloads.workload import Workload

FRAGILE = (
    "dvae.gumbel: logarithms of tiny numbers, and logits divided by a temperature down to 0.1",
    "dvae.words: many of a vocabulary's logits are equal in half formats; the argmax is over fp32",
    "loss.mse: a sum over all pixels passes fp16's largest number",
)


def build(config: WordsConfig, store: Mapping[str, Any] | None = None) -> Workload:
    """The workload for `config.data.dir`."""
    without_weights = config.model_copy(update={"model": config.model.model_copy(update={"weights": None})})
    workload = with_words(slots.build(without_weights, store), config)
    if store is None and config.model.weights:
        weights, _ = read_weights(Path(config.model.weights))
        load_weights_(workload.model, from_upstream(weights), source=config.model.weights)
    return workload


def over(config: WordsConfig, store: Store, samples: Samples) -> Workload:
    return with_words(random_data.over(config, store, samples), config)


def with_words(plain: Workload, config: WordsConfig) -> Workload:
    """SlotContrast's workload with the words' model, draws and losses."""
    backbone, m = plain.frozen["backbone"].module, config.model
    tau = Scheduled(lambda step: temperature(m, step))

    def prepare(batch: Batch, *, key: tuple[int, ...], training: bool) -> Batch:
        return plain.prepare(batch, key=key, training=training) | word_keys(batch["video"], key)

    def forward(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        assert isinstance(model, SlotContrastWords)
        outputs: dict[str, Tensor] = plain.forward(model, batch)
        return outputs | model.words_losses(
            outputs["slots"],
            batch["video"],
            tau.value,
            soft_noise=batch["soft_keys"].flatten(0, 1),
            word_noise=batch["word_keys"].flatten(0, 1),
            hard=m.hard,
            is_real=batch.get("is_real"),
        )

    def loss(outputs: Mapping[str, Tensor], batch: Batch) -> tuple[Tensor, Tensor | float]:
        total, weight = plain.weighed_loss(outputs, batch)
        pixels = batch["video"][0, 0].numel() if m.dvae_loss == "mean" else 1
        total = total + m.dvae_weight / pixels * outputs["mse"]
        if "cross_entropy" in outputs:
            words = (config.data.image_size // m.word_side) ** 2 if m.words_loss == "mean" else 1
            total = total + m.words_weight / words * outputs["cross_entropy"]
        return total, weight

    return replace(
        plain,
        model=words_model(config, backbone),
        prepare=prepare,
        forward=forward,
        loss=loss,
        values={**plain.values, "tau": tau},
        fragile=(*plain.fragile, *FRAGILE),
        settled={**plain.settled, **(settled_scale(config) if m.dvae_loss == "sum" and m.dvae_weight else {})},
    )


def words_model(config: WordsConfig, backbone: nn.Module) -> SlotContrastWords:
    """What trains."""
    m, recomputes = config.model, config.train.activation_checkpointing
    words = WordsSize(
        image_size=config.data.image_size,
        word_side=m.word_side,
        vocabulary=m.vocabulary,
        dim=m.words_dim,
        num_blocks=m.words_blocks,
        heads=m.words_heads,
        dropout=m.words_dropout,
        dvae_checkpointing=m.dvae_checkpointing or recomputes,
        checkpointing=recomputes,
    )

    def make(size: SlotContrastSize) -> SlotContrastWords:
        return SlotContrastWords(size, words)

    model = slots.build_model(config, backbone, make=make)
    assert isinstance(model, SlotContrastWords)
    return model
