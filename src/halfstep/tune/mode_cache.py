"""What trials found, kept on disk for the next run of the same model, shapes, device and versions.

A kept mode is followed where it pays: what its steps save over the run must be more than what its start takes. Compiled
code lies in another folder, which may be emptied; a mark in there tells whether this mode's code was put into it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
from pathlib import Path
from typing import Any

import torch

from halfstep import __version__
from halfstep.config.schema import RunConfig
from halfstep.disk import find_cache_directory
from halfstep.hardware.cache import read_json, write_json
from halfstep.precision.plan import Plan
from halfstep.precision.row import Gain
from halfstep.tune.mode_search import FoundMode
from halfstep.tune.modes import COMPILE_S, CUDNN_TRIALS_S, KERNEL_TUNING_S, WARM_START_S, compiled_code
from halfstep.workloads import KINDS
from halfstep.workloads.base.workload import Workload

MUCH_LONGER = 2.0  # a run so much longer than the one that measured tries what that one left untried


class CachedMode:
    def __init__(self, config: RunConfig, workload: Workload, plan: Plan) -> None:
        rows = (*plan.rows, *plan.frozen)
        identity = (
            "\n".join(map(str, (workload.model, *(part.module for part in workload.frozen.values())))),
            [config.train.batch_size, config.train.accumulate, config.data.image_size],
            KINDS.of(config.workload).size_of_sample(config),  # frames, tokens
            [config.optimizer.name, config.optimizer.moment_bits, config.precision.rounding, config.ema.enabled],
            [config.train.channels_last, config.train.tune_kernels, config.train.activation_checkpointing],
            [plan.granted, plan.device_name, [(row.module, row.compute) for row in rows if row.is_part]],
            [__version__, torch.__version__, torch.version.cuda, torch.backends.cudnn.version()],
        )
        self.name = f"mode-{hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16]}"
        self.path: Path = find_cache_directory() / f"{self.name}.json"

    def read(self) -> FoundMode | None:
        try:
            stored = read_json(self.path)
            fields = stored.pop("fields")
            fields["gains"] = tuple(Gain(**gain) for gain in fields["gains"])
            return FoundMode(**{**stored, "fields": fields, "untried": tuple(stored["untried"])})
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            return None  # nothing or nothing usable: measured again

    def write(self, found: FoundMode) -> str:
        """Empty, or why it could not be kept."""
        self.mark()
        return write_json(self.path, dataclasses.asdict(found))

    def for_run(self, num_steps: int) -> dict[str, Any] | None:
        """The plan's fields for a run of so many steps; None where it is to be measured for."""
        found = self.read()
        if found is None or _leaves_open(found, num_steps):
            return None
        start_s, saved_s = self._start_s(found), _saved_s(found, num_steps)
        fields = {**found.fields, "mode_reason": f"measured before: {found.fields['mode_reason']}"}
        if start_s <= saved_s:
            self.mark()
            return fields
        reason = (
            f"{found.fields['mode']} would save {saved_s:.0f} s of this run and take about {start_s:.0f} s to start"
        )
        plain = {"mode": "eager", "tunes_kernels": False, "cudnn_benchmark": False, "gains": ()}
        return {**fields, **plain, "mode_reason": f"{reason} ({fields['mode_reason']})"}

    def mark(self) -> None:
        """This mode's code is in the compiler's cache, or will be: gone when that is emptied."""
        with contextlib.suppress(OSError):  # then the next start counts as a cold one
            self._mark.parent.mkdir(parents=True, exist_ok=True)
            self._mark.touch()

    @property
    def _mark(self) -> Path:
        return compiled_code() / f"halfstep-{self.name}"

    def _start_s(self, found: FoundMode) -> float:
        fields = found.fields
        cold_s = KERNEL_TUNING_S if fields["tunes_kernels"] else COMPILE_S
        compiling_s = 0.0 if fields["mode"] == "eager" else WARM_START_S if self._mark.exists() else cold_s
        return compiling_s + (CUDNN_TRIALS_S if fields["cudnn_benchmark"] else 0.0)


def _leaves_open(found: FoundMode, num_steps: int) -> bool:
    expected_s = (found.eager_ms or found.ms) / 1e3 * num_steps
    return bool(found.untried) and expected_s > MUCH_LONGER * found.run_s


def _saved_s(found: FoundMode, num_steps: int) -> float:
    if found.eager_ms is None:
        return math.inf  # it does not run in any other mode
    return (found.eager_ms - found.ms) / 1e3 * num_steps
