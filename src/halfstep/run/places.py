"""Where a run's files are: stored as absolute paths, so that it can be resumed and evaluated from any folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from halfstep.config.schema import RunConfig
from halfstep.config.workloads import is_import_path
from halfstep.errors import DataError
from halfstep.run.folder import RunFolder

PATHS = {"data": ("dir", "train_list", "val_list", "cache_file"), "model": ("weights",)}
"""Settings that name files and folders, by section; not every workload has them all."""


def with_absolute_paths(config: RunConfig) -> RunConfig:
    """The same files whatever the working folder will be; `~` is the home folder."""
    is_own = is_import_path(config.workload)
    for section, names in PATHS.items():
        part = getattr(config, section)
        given = {name: getattr(part, name, None) for name in names}
        values = {name: _absolute(value, only_if_there=is_own) for name, value in given.items() if value}
        config = _with(config, section, values)
    return config


def with_data_found(config: RunConfig, folder: RunFolder) -> tuple[RunConfig, list[str]]:
    """A stored run's settings with its data folder as it is here, and what to know about it."""
    stored, here = config.data.dir, with_absolute_paths(config)
    if stored is None or is_import_path(config.workload):  # what it means is its workload's own business
        return here, []
    place = Path(_absolute(stored))
    if place.exists():
        return here, []
    demo = folder.path.absolute() / "data"  # demo data lie in the run's folder, and move with it
    if demo.is_dir():
        return _with(here, "data", {"dir": str(demo)}), [f"{stored} is not there: using the demo data in {demo}"]
    raise _missing(folder, stored, place)


def _missing(folder: RunFolder, stored: str, place: Path) -> DataError:
    if str(place) == stored:
        why = f"{folder.config} names that folder"
    else:
        why = f"{folder.config} names {stored}, relative to the folder the run was started in; here that is {place}"
    return DataError(
        f"the run's data folder {stored} is not there",
        why=why,
        fix="say where the data are now: --data DIR to evaluate, data.dir=DIR to resume",
    )


def _absolute(path: str, *, only_if_there: bool = False) -> str:
    if "://" in path:
        return path
    place = Path(path).expanduser().absolute()
    return str(place) if place.exists() or not only_if_there else path


def _with(config: RunConfig, section: str, values: dict[str, Any]) -> RunConfig:
    return config.model_copy(update={section: getattr(config, section).model_copy(update=values)})
