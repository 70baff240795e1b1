"""What config files may ask of a workload: its schema. Which workloads there are is handed in."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Protocol

from halfstep.config.foreign import Translator
from halfstep.config.schema import RunConfig
from halfstep.errors import ConfigError, nearest

IMPORT_PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


class HasSchema(Protocol):
    def schema(self, workload: str) -> type[RunConfig]: ...


class Schemas(Protocol):
    """Families by workload name; import paths of the user's own are found in it, too."""

    def __getitem__(self, workload: str) -> HasSchema: ...
    def __iter__(self) -> Iterator[str]: ...
    def translators(self) -> Iterable[Translator]: ...


def is_import_path(name: str) -> bool:
    """Whether this names a workload of the user's own, `my_pkg.my_mod:build`."""
    return IMPORT_PATH.fullmatch(name) is not None


def schema_for(workload: str, kinds: Schemas, where: str = "") -> type[RunConfig]:
    """The schema of a workload."""
    try:
        return kinds[workload].schema(workload)
    except KeyError:
        raise unknown_workload(workload, kinds, where) from None


def unknown_workload(workload: str, known: Iterable[str], where: str = "") -> ConfigError:
    at = f" ({where})" if where and where != workload else ""
    fix = f"{nearest(workload, known)} (or a YAML file, or an import path such as my_pkg.my_mod:build)"
    return ConfigError(f"unknown workload {workload!r}{at}", fix=fix)
