"""What compiling a step took and saved, kept on disk for later runs of the same model, shapes, device and versions."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass

import torch

from halfstep.disk import find_cache_directory
from halfstep.hardware.cache import read_json, write_json
from halfstep.step.step import GuardedStep

COMPILE_S, COMPILE_S_PER_NODE = 5.0, 0.02
"""About what Inductor takes for a step: seconds, and seconds per operation of its graphs (forward and backward)."""
LIKELY_SAVING = 0.25
"""Share of the time of captured torch kernels that compiled ones save: 12 to 56 % for six models on an H200."""


@dataclass(frozen=True)
class Compiling:
    """What compiling is expected to take, in seconds, and the share of a step's time that it saves."""

    seconds: float
    saving: float


class CompileHistory:
    """The stored result for one step and the shapes of a window."""

    def __init__(self, step: GuardedStep, shapes: object) -> None:
        identity = (
            str(step.model), str(shapes), [type(optimizer).__name__ for optimizer in step.optimizers],
            step.plan.granted, step.plan.device_name, torch.__version__,
        )  # fmt: skip
        name = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16]
        self.path = find_cache_directory() / f"step-{name}.json"

    def expect(self, num_nodes: int) -> Compiling:
        """Return what was measured before, or an estimate by the number of operations."""
        try:
            stored = read_json(self.path)
            return Compiling(float(stored["seconds"]), float(stored["saving"]))
        except (OSError, ValueError, LookupError, TypeError):  # no usable file: measure
            return Compiling(COMPILE_S + COMPILE_S_PER_NODE * num_nodes, LIKELY_SAVING)

    def write(self, found: Compiling) -> None:
        write_json(self.path, asdict(found))  # if it cannot be written, the next run measures again
