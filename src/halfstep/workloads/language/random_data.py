"""Made-up token ids, and the workload on them: what a bench, trials and estimates of memory run on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from halfstep.data.loader import Batch, Samples
from halfstep.data.seeds import generator_for
from halfstep.models.gpt2 import GPT2S
from halfstep.workloads.kind import Store
from halfstep.workloads.language.build import model_from_store, over_samples
from halfstep.workloads.language.config import LanguageConfig, context_of
from halfstep.workloads.workload import Workload


def random_store(config: LanguageConfig) -> dict[str, Any]:
    return {"vocab": config.model.vocab or GPT2S[config.workload].vocab, "tokenizer": None}


def random_batch(config: LanguageConfig, store: Store) -> Batch:
    """Ids as a loader delivers them."""
    generator, size = generator_for(config.train.seed), config.train.batch_size
    ids = torch.randint(store["vocab"], (size, context_of(config) + 1), generator=generator)
    return {"tokens": ids[:, :-1].contiguous(), "targets": ids[:, 1:].contiguous(), "index": torch.arange(size)}


def over(config: LanguageConfig, store: Store, samples: Samples) -> Workload:
    return over_samples(config, store, model_from_store(config, store), train=samples, val=samples)


def peer_prepare(device: torch.device) -> Callable[[Batch], Batch]:
    return lambda batch: batch
