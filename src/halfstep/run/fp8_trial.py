"""What fp8 gains in the layers of a run, at the batch it trains with: measured only where fp8 was asked for."""

from __future__ import annotations

import os
from collections.abc import Callable

from halfstep.config.schema import PrecisionConfig, RunConfig
from halfstep.data.loader import Loader
from halfstep.hardware.cache import cache_directory
from halfstep.hardware.facts import Hardware
from halfstep.hardware.fp8_layers import Fp8Gain, LayerShape, gains_once
from halfstep.precision.fp8_pays import measured_gains
from halfstep.precision.ladder import lacks
from halfstep.workloads.workload import Batch, Workload


def fp8_gains(
    config: RunConfig,
    workload: Workload,
    hardware: Hardware,
    *,
    measure: Callable[..., dict[LayerShape, Fp8Gain]] = gains_once,
) -> dict[str, Fp8Gain]:
    """Gain by module name, for `decide(..., fp8_gains=...)`; empty where nothing is to be measured."""
    if not _is_to_measure(config.precision) or not hardware.device or lacks("fp8", hardware):
        return {}
    batch = _one_batch(config, workload)
    directory = cache_directory(os.environ)
    return measured_gains(
        workload.model, lambda: workload.forward(workload.model, batch), hardware, directory, measure=measure
    )


def _is_to_measure(wish: PrecisionConfig) -> bool:
    asked = "fp8" in (wish.default, *wish.modules.values())
    return asked and not wish.simulate and not wish.force


def _one_batch(config: RunConfig, workload: Workload) -> Batch:
    """As the model sees it. A sample is a function of seed, epoch and index, so reading it changes nothing."""
    train = config.train
    loader = Loader(workload.train_samples, batch_size=train.batch_size, seed=train.seed, shuffle=True)
    try:
        return workload.prepare(next(loader.epoch(0)), key=(), training=False)
    finally:
        loader.close()
