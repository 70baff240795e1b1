"""The plan of a config without running it, on hardware that is here or only named."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path

from halfstep.config.schema import RunConfig
from halfstep.hardware.facts import Hardware
from halfstep.hardware.gpus import known_gpu
from halfstep.hardware.probe import probe
from halfstep.precision.plan import Plan
from halfstep.run.assemble import build_workload, plan_for
from halfstep.run.places import with_absolute_paths
from halfstep.workloads import KINDS

DEMO_NOTE = (
    "no data folder was given: this is the plan of the DEMO, whose model may be smaller; yours with --data-dir DIR"
)


def plan(config: RunConfig, *, gpu: str | None = None) -> Plan:
    """Build the model as training would, on demo data where none are given, and decide for the hardware."""
    if gpu:
        return _with_what_is_untimed(_plan(config, known_gpu(gpu)))
    return _plan(config, probe(config.device))


def _plan(config: RunConfig, hardware: Hardware) -> Plan:
    config = with_absolute_paths(config)
    kind = KINDS.of(config.workload)
    if config.data.dir is not None or kind.demo is None:
        return plan_for(config, build_workload(config), hardware)
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "demo"
        kind.write_demo(config.workload, data, seed=config.train.seed)
        with_data = config.model_copy(update={"data": config.data.model_copy(update={"dir": str(data)})})
        return _with_warning(plan_for(with_data, build_workload(with_data), hardware), DEMO_NOTE)


def _with_what_is_untimed(decided: Plan) -> Plan:
    """Where fp8 pays is found by timing layers and steps, which a GPU that is not here cannot be asked for."""
    if decided.granted != "fp8":
        return decided
    note = f"no layer was timed: on {decided.device_name} itself, layers or a step that fp8 does not speed up run bf16"
    return _with_warning(decided, note)


def _with_warning(decided: Plan, line: str) -> Plan:
    return dataclasses.replace(decided, warnings=(*decided.warnings, line))
