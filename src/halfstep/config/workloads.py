"""Which workloads have a schema: an explicit dict, no registration by import."""

from __future__ import annotations

import re

from halfstep.config.schema import RunConfig
from halfstep.errors import ConfigError, nearest
from halfstep.workloads.classification.config import CLASSIFIER_SCHEMAS
from halfstep.workloads.segmentation.config import UNetConfig

SCHEMAS: dict[str, type[RunConfig]] = {"unet": UNetConfig, **CLASSIFIER_SCHEMAS}

IMPORT_PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


def is_import_path(name: str) -> bool:
    """Whether this names a workload of the user's own, `my_pkg.my_mod:build`."""
    return IMPORT_PATH.fullmatch(name) is not None


def schema_for(workload: str, where: str = "") -> type[RunConfig]:
    """The schema of a workload; one of the user's own has the settings that all workloads share."""
    if is_import_path(workload):
        return RunConfig
    if workload not in SCHEMAS:
        at = f" ({where})" if where and where != workload else ""
        fix = f"{nearest(workload, SCHEMAS)} (or a YAML file, or an import path such as my_pkg.my_mod:build)"
        raise ConfigError(f"unknown workload {workload!r}{at}", fix=fix)
    return SCHEMAS[workload]
