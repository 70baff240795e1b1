"""Evaluation of language models: the metrics over all of a text."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from halfstep.config.schema import RunConfig
from halfstep.workloads.base.other_data import any_folder
from halfstep.workloads.base.using import PlainEvaluation
from halfstep.workloads.base.workload import Workload
from halfstep.workloads.language.tokens import TokenSamples


class LanguageEvaluation(PlainEvaluation):
    """Another text is evaluated whole, unless it has a validation part of its own."""

    @staticmethod
    def config_for(config: RunConfig, folder: Path) -> RunConfig:
        return any_folder(config, folder, val_fraction=0.0, cache=False)  # nothing is written beside others' texts

    @staticmethod
    def on_all(workload: Workload) -> Workload:
        samples = workload.train_samples
        if len(workload.val_samples) or not isinstance(samples, TokenSamples):
            return workload
        whole = TokenSamples(samples.tokens, context=samples.context, vocab=samples.vocab, is_training=False)
        return replace(workload, val_samples=whole)
