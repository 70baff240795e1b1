"""halfstep: mixed-precision training for PyTorch that is fast, safe and provable.

Public names resolve on first use, so `import halfstep` loads nothing heavy:

    import halfstep as hs
    step = hs.Step(model, optimizer, precision="auto", clip_norm=1.0, accumulate=4)
    for window in step.windows(loader):
        outcome = step(loss_fn, window)
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

__version__ = "0.1.0"

_PUBLIC = {
    "Fast": "halfstep.fast.fast_path",
    "Outcome": "halfstep.own_loop.step",
    "Precision": "halfstep.precision.decide",
    "Step": "halfstep.own_loop.step",
    "TrainingStopped": "halfstep.errors",
    "decide": "halfstep.precision.decide",
    "fp32_island": "halfstep.islands",
    "ledger": "halfstep.own_loop.evidence",
    "load": "halfstep.own_loop.save_and_load",
    "per_epoch": "halfstep.own_loop.schedule_argument",
    "per_step": "halfstep.own_loop.schedule_argument",
    "prefetch": "halfstep.prefetching",
    "probe": "halfstep.hardware.probe",
    "replay": "halfstep.own_loop.evidence",
    "save": "halfstep.own_loop.save_and_load",
    "save_weights": "halfstep.own_loop.save_and_load",
    "seeded": "halfstep.own_loop.seeded",
    "simulate": "halfstep.precision.contexts",
    "train": "halfstep_train.api",
}


def _has_application() -> bool:
    return importlib.util.find_spec("halfstep_train") is not None


# `from halfstep import *` and help() read every name of this list.
__all__ = ["__version__", "integrations", *sorted(name for name in _PUBLIC if name != "train" or _has_application())]


def __getattr__(name: str) -> Any:
    if name == "integrations":
        return importlib.import_module("halfstep.integrations")
    if name not in _PUBLIC:
        raise AttributeError(f"module 'halfstep' has no attribute {name!r}; public names: {', '.join(sorted(_PUBLIC))}")
    if name == "train":
        from halfstep.errors import import_application

        return import_application("api", "hs.train").train
    return getattr(importlib.import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
