"""Workloads by name: an explicit dict, resolved when one is asked for. One file each, with `build(config, store)`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halfstep.errors import ConfigError, DataError, nearest
from halfstep.workloads.import_path import imported, refuse_other_form

if TYPE_CHECKING:
    from halfstep.config.schema import RunConfig
    from halfstep.workloads.workload import Workload

CLASSIFIERS = ("resnet18", "resnet34", "resnet50", "resnet101", "resnet152", "vit_s_16", "vit_b_16", "vit_l_16")
BUILDERS = {
    "unet": "halfstep.workloads.segmentation.build:build",
    **dict.fromkeys(CLASSIFIERS, "halfstep.workloads.classification.build:build"),
}
DEMOS = {
    "unet": "halfstep.workloads.segmentation.demo:write_demo",
    **dict.fromkeys(CLASSIFIERS, "halfstep.workloads.classification.demo:write_demo"),
}
"""What writes demo data in the layout that a workload reads."""
FORM = "build(config, store) -> halfstep.workloads.workload.Workload"


def build(config: RunConfig, store: Mapping[str, Any] | None = None) -> Workload:
    """The workload that `config.workload` names: one of ours, or an import path `pkg.module:build`."""
    path = BUILDERS.get(config.workload, config.workload)
    if ":" not in path:
        fix = nearest(config.workload, BUILDERS) + " Or an import path such as my_pkg.my_mod:build"
        raise ConfigError(f"unknown workload {config.workload!r}", fix=fix)
    builder = imported(path, what="workload", form=FORM)
    refuse_other_form(builder, path, config, store, form=FORM)
    workload = builder(config, store)
    from halfstep.workloads.workload import Workload

    if not isinstance(workload, Workload):
        raise ConfigError(f"{path} gives a {type(workload).__name__}, not a Workload", fix=f"write {FORM}")
    return workload


def has_demo(workload: str) -> bool:
    """Whether there is something to train on without a data folder; what is not ours has its own data."""
    return workload in DEMOS


def write_demo(workload: str, folder: Path, *, seed: int) -> None:
    """Demo data for a workload, in the layout of real data."""
    if workload not in DEMOS:
        raise DataError(f"no data folder, and {workload} has no demo data", fix="--data-dir DIR")
    imported(DEMOS[workload], what="demo data", form="write_demo(folder, seed=0)")(folder, seed=seed)
