"""The plan of a config without running it, on hardware that is here or only named."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from halfstep.config.schema import RunConfig
from halfstep.hardware.facts import Hardware
from halfstep.hardware.gpus import look_up_gpu
from halfstep.hardware.probe import probe
from halfstep.models.first_values import unfilled
from halfstep.precision.plan import Plan
from halfstep.run.assemble import build_workload, plan_for
from halfstep.run.folder import with_absolute_paths
from halfstep.workloads import KINDS

DEMO_NOTE = (
    "no data folder was given: this is the plan of the DEMO, whose model may be smaller; yours with --data-dir DIR"
)


def plan(config: RunConfig, *, gpu: str | None = None) -> Plan:
    """Build the model as training would, on demo data where none are given, and decide for the hardware."""
    if gpu:
        return _with_what_is_untimed(_plan(config, look_up_gpu(gpu)))
    return _plan(config, probe(config.device))


def _plan(config: RunConfig, hardware: Hardware) -> Plan:
    with data_at_hand(config) as with_data, unfilled():
        decided = plan_for(with_data, build_workload(with_data), hardware)
        return _with_warning(decided, DEMO_NOTE) if is_demo(config) else decided


def is_demo(config: RunConfig) -> bool:
    return config.data.dir is None and KINDS.of(config.workload).demo is not None


@contextmanager
def data_at_hand(config: RunConfig) -> Iterator[RunConfig]:
    """The config with data to build the workload from: its own, or demo data that are gone afterwards."""
    config = with_absolute_paths(config)
    if not is_demo(config):
        yield config
        return
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "demo"
        KINDS.of(config.workload).write_demo(config.workload, data, seed=config.train.seed)
        yield config.changed(data={"dir": str(data)})


def _with_what_is_untimed(decided: Plan) -> Plan:
    """Where fp8 pays is found by timing layers and steps, which a GPU that is not here cannot be asked for."""
    if decided.granted != "fp8":
        return decided
    note = f"no layer was timed: on {decided.device_name} itself, layers or a step that fp8 does not speed up run bf16"
    return _with_warning(decided, note)


def _with_warning(decided: Plan, line: str) -> Plan:
    return dataclasses.replace(decided, warnings=(*decided.warnings, line))
