"""Settings of SlotContrast with a discrete VAE and a decoder of words beside it."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field

from halfstep.config.section import Fraction, OffCount, OffNumber, Positive, PositiveCount
from halfstep.workloads.slots.config import SlotContrastConfig, SlotContrastModelConfig

Reduction = Literal["sum", "mean"]


class WordsModelConfig(SlotContrastModelConfig):
    """SlotContrast, and words that its slots predict."""

    vocabulary: PositiveCount = Field(default=4096, description="Words of the discrete VAE")
    word_side: Literal[4, 14] = Field(default=14, description="Side of a word in pixels; 14: a word for each patch")
    words_blocks: OffCount = Field(default=4, description="Blocks of the decoder of words; 0: the VAE alone")
    words_heads: PositiveCount = Field(default=4, description="Their attention heads")
    words_dim: PositiveCount = Field(default=128, description="Channels of the decoder of words")
    words_dropout: Fraction = Field(default=0.1, description="Dropout in the decoder of words")
    hard: bool = Field(
        default=True, description="The VAE's decoder sees one word per position; gradients are the mixture's"
    )
    tau_start: Positive = Field(default=1.0, description="Temperature of the mixture at the first step")
    tau_final: Positive = Field(default=0.1, description="Temperature after tau_steps")
    tau_steps: PositiveCount = Field(default=10_000, description="Steps of the cosine between both")
    dvae_weight: OffNumber = Field(default=0.5, description="Weight of the VAE's squared error")
    dvae_loss: Reduction = Field(default="sum", description="Squared error of a frame: a sum over pixels, or the mean")
    dvae_checkpointing: bool = Field(
        default=False, description="Compute the VAE's decoder again in backward: less memory, more time"
    )
    words_weight: OffNumber = Field(default=1.0, description="Weight of the words' cross-entropy")
    words_loss: Reduction = Field(default="mean", description="Cross-entropy of a frame: a sum over words, or the mean")


class WordsConfig(SlotContrastConfig):
    """One run of SlotContrast with words."""

    demo: ClassVar[dict[str, Any]] = {
        **SlotContrastConfig.demo,
        "model.word_side": 4,
        "model.vocabulary": 64,
        "model.words_blocks": 2,
        "model.words_dim": 64,
        "model.tau_steps": 150,
        "model.dvae_loss": "mean",
        "train.max_steps": 200,
    }

    model: WordsModelConfig = WordsModelConfig()
