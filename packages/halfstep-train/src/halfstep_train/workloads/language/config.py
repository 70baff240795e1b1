"""Settings of GPT-2. Defaults are those of GPT-2 124M in nanoGPT and llm.c, except for the length of a run."""

from __future__ import annotations

from typing import Any, ClassVar

from halfstep_train.config.schema import BuiltModelConfig, DataConfig, RunConfig, TransformerSize
from halfstep_train.config.section import CachePath, FilePath, NamedPath, OffCount, setting

Preset = dict[str, Any]
CONTEXT = 1024
"""Context length of all published sizes."""


class TextDataConfig(DataConfig):
    """A text file, a folder of texts, or files of token ids."""

    image_size: ClassVar[int] = 0  # type: ignore[misc]  # texts have no such setting

    dir: NamedPath = setting(None, "Text file or folder; without it, halfstep trains on generated demo text")
    tokenizer: str = setting(
        "auto",
        "bytes, characters, a tokenizer.json or its folder, tiktoken:NAME; auto: the one next to the data "
        "or the weights, or bytes",
        min_length=1,
    )
    cache: bool = setting(True, "Tokenise once and cache the tokens in a file; false: tokenise in memory at each start")
    cache_file: CachePath = setting(None, "File for the tokenised text; default: a hidden file next to the text")


class LanguageModelConfig(TransformerSize, BuiltModelConfig):
    """GPT-2 of any size; 0 means the size of the workload's name."""

    context: OffCount = setting(0, "Context length in tokens; 0: 1024")
    vocab: OffCount = setting(0, "Vocabulary size; 0: that of the tokenizer, or 50257")
    dropout: float = setting(0.0, "Dropout rate of embeddings, attention and residual branches", ge=0, lt=1)
    bias: bool = setting(True, "Biases in linear layers and LayerNorm; GPT-2 has them")
    weights: FilePath = setting(None, "Weights to start from: a file or folder from Hugging Face or nanoGPT")


# nanoGPT's config/train_shakespeare_char.py, a "baby GPT" for one GPU; its best validation loss is 1.47.
BABY: Preset = {
    "data.tokenizer": "characters",
    "model.depth": 6,
    "model.heads": 6,
    "model.dim": 384,
    "model.context": 256,
    "model.dropout": 0.2,
    "model.bias": False,
    "train.batch_size": 64,
    "train.max_steps": 5000,
    "optimizer.lr": 1e-3,
    "optimizer.betas": (0.9, 0.99),
    "schedule.warmup_steps": 100,
}

PRESETS: dict[str, Preset] = {
    "fast": {"precision.default": "bf16"},
    "quality": {"precision.default": "bf16", "model.dropout": 0.1},
    "lowmem": {"precision.default": "bf16", "train.memory": "low", "train.batch_size": 4, "train.accumulate": 4},
    "stable": RunConfig.presets["stable"],
    "debug": {
        "precision.default": "fp32",
        "train.batch_size": 4,
        "train.max_steps": 20,
        "train.fast": "off",
        "data.num_workers": 0,
        "schedule.warmup_steps": 2,
    },
    "shakespeare": BABY,
}

# Measured once: about 150 s of one CPU core (Neoverse-N1). See demo.py for the text and its entropy.
DEMO: Preset = {
    "data.tokenizer": "characters",
    "data.num_workers": 0,
    "model.depth": 2,
    "model.heads": 4,
    "model.dim": 64,
    "model.context": 128,
    "train.max_steps": 1000,
    "optimizer.lr": 8e-3,
    "optimizer.betas": (0.9, 0.99),
    "schedule.warmup_steps": 50,
}


class LanguageConfig(RunConfig):
    """One run of a language model."""

    presets: ClassVar[dict[str, dict[str, Any]]] = PRESETS
    demo: ClassVar[dict[str, Any]] = DEMO
    # AdamW as in GPT-3 (Brown et al. 2020) for models of this size; a short warmup, then a cosine to a tenth of the
    # learning rate. Most runs are limited by train.max_steps.
    defaults: ClassVar[dict[str, Any]] = {
        "optimizer.lr": 6e-4,
        "optimizer.weight_decay": 0.1,
        "optimizer.betas": (0.9, 0.95),
        "schedule.warmup_steps": 200,
        "schedule.min_factor": 0.1,
        "train.epochs": 1,
        "train.batch_size": 16,
        "train.early_stopping_patience": 0,
    }

    data: TextDataConfig = TextDataConfig()
    model: LanguageModelConfig = LanguageModelConfig()


def get_context(config: LanguageConfig, store: object = None) -> int:
    """Return the number of tokens per sample."""
    return config.model.context or CONTEXT
