"""Made-up token ids, and the workload on them: what a bench, trials and estimates of memory run on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from halfstep.data.loader import Batch, Samples
from halfstep.data.seeds import generator_for
from halfstep.models.gpt2 import GPT2S
from halfstep.workloads import model_of
from halfstep.workloads.kind import Store
from halfstep.workloads.language.build import model_from_store, model_size, over_samples
from halfstep.workloads.language.config import LanguageConfig, context_of
from halfstep.workloads.workload import Workload


def random_store(config: LanguageConfig) -> dict[str, Any]:
    return {"vocab": config.model.vocab or GPT2S[model_of(config)].vocab, "tokenizer": None}


def random_batch(config: LanguageConfig, store: Store) -> Batch:
    """Ids as a loader delivers them."""
    generator, size = generator_for(config.train.seed), config.train.batch_size
    ids = torch.randint(store["vocab"], (size, context_of(config) + 1), generator=generator)
    return {"tokens": ids[:, :-1].contiguous(), "targets": ids[:, 1:].contiguous(), "index": torch.arange(size)}


def over(config: LanguageConfig, store: Store, samples: Samples) -> Workload:
    return over_samples(config, store, model_from_store(config, store), train=samples, val=samples)


def peer_prepare(device: torch.device) -> Callable[[Batch], Batch]:
    return lambda batch: batch


def flops_per_sample(config: LanguageConfig, store: Store) -> float:
    """Six for each weight of a matmul and token, and attention's 12 · depth · dim · context (Chowdhery et al. 2022), of
    which a causal mask leaves half to do; it is counted whole, as others count it."""
    size, context = model_size(config, store), context_of(config)
    in_blocks = 12 * size.depth * size.dim**2
    return 6.0 * context * (in_blocks + size.vocab * size.dim) + 12.0 * size.depth * size.dim * context**2
