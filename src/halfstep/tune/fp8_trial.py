"""What fp8 gains in the layers of a run, at the batch it trains with: measured only where fp8 was asked for."""

from __future__ import annotations

from collections.abc import Callable

from halfstep.config.schema import PrecisionConfig, RunConfig
from halfstep.disk import cache_directory
from halfstep.hardware.facts import Hardware
from halfstep.hardware.fp8_layers import Fp8Gain, LayerShape, gains_once
from halfstep.precision.fp8_pays import measured_gains
from halfstep.precision.ladder import lacks
from halfstep.tune.first_batch import first_batch
from halfstep.workloads.workload import Workload


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
    batch = workload.prepared(first_batch(config, workload), key=(), training=False)
    directory = cache_directory()
    return measured_gains(
        workload.model, lambda: workload.forward(workload.model, batch), hardware, directory, measure=measure
    )


def _is_to_measure(wish: PrecisionConfig) -> bool:
    asked = "fp8" in (wish.default, *wish.modules.values())
    return asked and not wish.simulate and not wish.force
