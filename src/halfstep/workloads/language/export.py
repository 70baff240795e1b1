"""A trained GPT-2 as a folder of Hugging Face's: weights, config, tokenizer."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from halfstep.data.tokenizers import save_tokenizer
from halfstep.models.gpt2_weights import save_gpt2
from halfstep.workloads.kind import Store
from halfstep.workloads.language.config import LanguageConfig
from halfstep.workloads.language.data import stored_tokenizer


def export(model: nn.Module, config: LanguageConfig, store: Store, folder: Path) -> None:
    tokenizer = stored_tokenizer(store)
    save_gpt2(model, folder, ends_at=tokenizer.end if tokenizer is not None else None)
    if tokenizer is not None:
        save_tokenizer(tokenizer, folder)
