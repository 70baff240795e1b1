"""Workloads by name: an explicit dict, resolved when one is asked for. One file each, with `build(config, store)`."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from halfstep.errors import ConfigError, nearest

if TYPE_CHECKING:
    from halfstep.config.schema import RunConfig
    from halfstep.workloads.workload import Workload

BUILDERS = {"unet": "halfstep.workloads.unet:build"}


def build(config: RunConfig, store: Mapping[str, Any] | None = None) -> Workload:
    """The workload that `config.workload` names: one of ours, or an import path `pkg.module:build`."""
    path = BUILDERS.get(config.workload, config.workload)
    module_name, _, function_name = path.partition(":")
    if not function_name:
        fix = nearest(config.workload, BUILDERS) + " Or an import path such as my_pkg.my_mod:build"
        raise ConfigError(f"unknown workload {config.workload!r}", fix=fix)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"workload {config.workload!r} cannot be imported",
            why=str(error),
            fix="run where the module is found, or set PYTHONPATH",
        ) from error
    builder = getattr(module, function_name, None)
    if not callable(builder):
        raise ConfigError(f"{module_name} has no function {function_name!r}", fix="build(config, store) -> Workload")
    workload: Workload = builder(config, store)
    return workload
