"""The keys of a config that join STEVE's half to SlotContrast: a discrete VAE and a decoder of its words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from halfstep.errors import ConfigError
from halfstep.workloads.base.foreign_reader import Reader

VAE_LOSS, WORDS_LOSS = "DVAEReconstructionLoss", "STEVECrossEntropyLoss"
SIZES = {
    "model.vocabulary": "dvae.vocab_size",
    "model.dvae_checkpointing": "dvae.use_checkpoint",
    "model.words_dim": "steve_decoder.d_model",
    "model.words_blocks": "steve_decoder.num_decoder_blocks",
    "model.words_heads": "steve_decoder.num_decoder_heads",
    "model.words_dropout": "steve_decoder.dropout",
    "model.tau_start": "gumbel_start_temp",
    "model.tau_final": "gumbel_final_temp",
    "model.tau_steps": "gumbel_anneal_steps",
}
"""Our settings by their keys below `model`."""


def has_words(read: Reader) -> bool:
    """Whether the file switches the VAE on."""
    is_on, predicts = bool(read("model.use_dvae", False)), bool(read("model.use_steve_decoder", False))
    if predicts and not is_on:
        raise ConfigError(
            "model.use_steve_decoder is on and model.use_dvae is off",
            why="the decoder predicts the words of the discrete VAE",
            fix="switch both on, or both off",
        )
    return is_on


def words_of(read: Reader) -> dict[str, Any]:
    """Sizes and temperatures; losses come with the others (`word_loss`)."""
    vocabulary, side = read("model.dvae.vocab_size"), read("dataset.train_pipeline.transforms.input_size")
    read.must_be("model.dvae.img_channels", 3, why="frames have three colours")
    read.must_be("model.dvae.encode_only", False, why="without its decoder nothing trains the VAE")
    values = {ours: read(f"model.{theirs}") for ours, theirs in SIZES.items()}
    if not read("model.use_steve_decoder", False):
        return values | {"model.words_blocks": 0}
    read.must_be("model.steve_decoder.vocab_size", vocabulary, why=f"the VAE has {vocabulary} words")
    read.must_be("model.steve_decoder.slot_size", read("model.initializer.dim"), why="slots have their own size")
    read.must_be("model.steve_decoder.image_size", side, why=f"frames have {side} pixels")
    return values


def word_loss(given: Mapping[str, Any], weight: float, where: str) -> dict[str, Any]:
    """One of the two losses of the words, in our settings."""
    reduction = given.get("reduction", "mean")
    if reduction not in ("sum", "mean") or (reduction == "sum" and not given.get("normalize", True)):
        raise ConfigError(
            f"{where} has reduction {reduction}, normalize {given.get('normalize', True)}",
            fix="reduction: mean, or sum with normalize: true, which divides by the frames",
        )
    part = "dvae" if given["name"] == VAE_LOSS else "words"
    return {f"model.{part}_weight": weight, f"model.{part}_loss": reduction}
