"""Metrics and evaluation of language models: perplexity and bits per byte, exact over a whole data set."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from halfstep_train.config.schema import RunConfig
from halfstep_train.workloads.base.sums import Sums
from halfstep_train.workloads.base.using import PlainEvaluation, use_folder
from halfstep_train.workloads.base.workload import Workload
from halfstep_train.workloads.language.texts import TokenSamples


def count_targets(batch: Mapping[str, Tensor]) -> Tensor:
    """Count the targets that are not padding, on the device."""
    return (batch["targets"] >= 0).sum()


class LanguageMetrics(Sums):
    """Perplexity and bits per byte, from sums over tokens on the device in fp64.

    `byte_lengths` holds the number of bytes of each token; if all are 0, there are no bits per byte.
    """

    def __init__(self, byte_lengths: Tensor) -> None:
        super().__init__()
        self.byte_lengths = byte_lengths

    def update(self, outputs: Tensor, batch: Mapping[str, Tensor]) -> None:
        """Add a batch by its mean loss (`outputs`), without waiting for the device."""
        targets = batch["targets"]
        self.byte_lengths = self.byte_lengths.to(targets.device)
        count = count_targets(batch).double()
        num_bytes = torch.where(targets >= 0, self.byte_lengths[targets.clamp(min=0)], 0).sum().double()
        self.add(sums=torch.stack([outputs.detach().double() * count, count, num_bytes]))

    def compute(self) -> dict[str, float]:
        """Return `perplexity` and, if lengths are known, `bits_per_byte`; waits for the device."""
        nats, tokens, num_bytes = self.sums["sums"].tolist() if self.sums else (0, 0, 0)
        if not tokens:
            return {}
        mean = nats / tokens
        found = {"perplexity": math.exp(mean) if mean < 700 else math.inf}
        return found | ({"bits_per_byte": nats / math.log(2) / num_bytes} if num_bytes else {})


class LanguageEvaluation(PlainEvaluation):
    """Evaluation of language models; another text is evaluated as a whole, unless it has a validation split."""

    @staticmethod
    def change_data_folder(config: RunConfig, folder: Path) -> RunConfig:
        return use_folder(config, folder, val_fraction=0.0, cache=False)  # no cache file is written to that folder

    @staticmethod
    def use_all_samples(workload: Workload) -> Workload:
        samples = workload.train_samples
        if len(workload.val_samples) or not isinstance(samples, TokenSamples):
            return workload
        whole = TokenSamples(samples.tokens, context=samples.context, vocab=samples.vocab, is_training=False)
        return replace(workload, val_samples=whole)
