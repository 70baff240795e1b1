"""A run's folder: `config.yaml plan.json metrics.jsonl checkpoints/ report/ model/`; never overwritten or half-made."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import operator
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halfstep.config.keys import list_fields
from halfstep.config.load import Loaded
from halfstep.config.schema import RunConfig, is_import_path
from halfstep.config.section import IS_PATH
from halfstep.config.yaml_source import read_yaml
from halfstep.data.files import list_some
from halfstep.data.loader import FileSamples, implements
from halfstep.disk import (
    find_unused_path,
    is_dry_run,
    make_absolute,
    own_folder,
    parse_json,
    read_sealed,
    seal,
    write_atomically,
)
from halfstep.errors import CheckpointError, DataError, format_count, make_printable, suggest_command
from halfstep.precision.plan import Plan
from halfstep.run.checkpoint import Checkpoints
from halfstep.workloads import KINDS, load
from halfstep.workloads.base.import_path import refuse_unknown_code
from halfstep.workloads.base.workload import Workload


@dataclass(frozen=True, kw_only=True, slots=True)
class Settled:
    """What settled.json holds: the settings of the run, apart from config.yaml, which users edit."""

    settings: dict[str, Any]
    """All of them, as the run was last trained with."""
    decided: dict[str, list[Any]]
    """Those that the run decided by itself, by path, with what was asked for."""
    code: dict[str, str]
    """Signatures of the user's code that it was trained with, by import path."""


@dataclass(frozen=True, slots=True)
class RunFolder:
    path: Path

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def plan(self) -> Path:
        return self.path / "plan.json"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def model(self) -> Path:
        """The trained model in a form that others read, where the family has one."""
        return self.path / "model"

    @property
    def report(self) -> Path:
        return self.path / "report"

    def write_settled(self, settled: Settled) -> None:
        write_atomically(self.path / "settled.json", json.dumps(seal(dataclasses.asdict(settled))))

    def settled(self) -> Settled:
        return Settled(**self._sealed(self.path / "settled.json"))

    def write_plan(self, plan: Plan) -> None:
        write_atomically(self.plan, json.dumps(seal(dataclasses.asdict(plan)), indent=2))

    def stored_plan(self) -> Plan:
        return Plan.from_json(json.dumps(self._sealed(self.plan)))

    def _sealed(self, path: Path) -> dict[str, Any]:
        try:
            return read_sealed(path.read_bytes())
        except (OSError, ValueError) as error:
            why = (error.strerror if isinstance(error, OSError) else None) or str(error)
            again = suggest_command("train", self.config, "--out", "DIR")
            raise CheckpointError(
                f"cannot use {path}", why=why, fix=f"put the file back, or start a new run: {again}"
            ) from error

    def checkpoints(self, *, keep: int = 0, writes: bool = True) -> Checkpoints:
        return Checkpoints(self.path / "checkpoints", keep=keep, writes=writes)

    def locked(self) -> AbstractContextManager[None]:
        return own_folder(self.path)

    @classmethod
    def planned(cls, out: str | None, name: str) -> RunFolder:
        """Where a new run would be; nothing is made. A second run of the same second gets a number."""
        return cls(Path(out) if out else find_unused_path(Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"))

    @classmethod
    def create(cls, out: str | None, name: str) -> RunFolder:
        """A new folder, made by this call alone: an existing one with content is an error."""
        path = cls.planned(out, name).path
        if make_printable(str(path)) != str(path):
            raise CheckpointError(
                f"the run's folder {path} is not UTF-8",
                why="safetensors could not read its checkpoints again",
                fix="choose another name with --out",
            )
        if path.is_dir() and any(path.iterdir()):
            raise _taken(cls(path))
        try:
            (path / "report").mkdir(parents=True)
        except OSError as error:
            raise CheckpointError(
                f"cannot make the run's folder {path}: {error.strerror}", fix="choose a writable place with --out"
            ) from error
        return cls(path)

    @classmethod
    def open(cls, path: str) -> RunFolder:
        folder = cls(Path(path))
        if not folder.path.is_dir():
            raise CheckpointError(f"there is no run folder {path}", fix="give the folder that `halfstep train` named")
        if not folder.config.is_file():
            raise CheckpointError(
                f"{path} is not a run folder: it has no config.yaml", fix="give the folder that `halfstep train` named"
            )
        return folder


def find_import_paths(config: RunConfig) -> list[str]:
    """Return the user's code that a config names."""
    named = (config.workload, getattr(config.model, "path", None) or "")
    return [path for path in named if is_import_path(path)]


def load_stored(
    file: Path,
    code: Mapping[str, str],
    *,
    trust: bool,
    flags: Mapping[str, object] | None = None,
    overrides: Sequence[str] = (),
) -> Loaded:
    """Load the config of a stored run or capsule; code that its user did not train with is refused before anything is
    imported."""
    workload = read_yaml(file).values.get("workload")
    # A list, because `in KINDS` would import the code. A reference such as `${globals.x}` is refused, too.
    if not trust and workload is not None and str(workload) not in list(KINDS):
        refuse_unknown_code([str(workload)], code, file)
    loaded = load(str(file), flags=flags, overrides=overrides)
    if not trust:
        refuse_unknown_code(find_import_paths(loaded.config), code, file)
    return loaded


def how_to_go_on(path: Path) -> str:
    """For the user of a run that stopped before its end."""
    if is_dry_run(path):
        return "--dry removes it now: leave that out to go on later"
    return f"continue with: {suggest_command('train', '--resume', path)}"


def _taken(folder: RunFolder) -> CheckpointError:
    """Only a run with a checkpoint can be continued; one that was killed before its first is of no use to anybody."""
    fix = "choose another --out"
    if folder.checkpoints().all():
        fix += f", or continue that run with: {suggest_command('train', '--resume', folder.path)}"
    elif folder.config.is_file():
        fix += f", or remove {folder.path}: that run ended before its first checkpoint"
    return CheckpointError(
        f"{folder.path} already exists and is not empty", why="a run never overwrites another one", fix=fix
    )


# --- where its files are ---


def with_absolute_paths(config: RunConfig) -> RunConfig:
    """The same files whatever the working folder will be; `~` is the home folder."""
    is_own = is_import_path(config.workload)
    for path, field in list_fields(type(config)).items():
        if IS_PATH in field.metadata and (value := operator.attrgetter(path)(config)):
            # What a model is made of may be a word (`random`), and what is missing is named as it was typed.
            place = _absolute(value, only_if_there=is_own or not path.startswith("data."))
            config = _with_setting(config, path.split("."), place)
    return config


def _with_setting(section: Any, names: Sequence[str], value: str) -> Any:
    name, *rest = names
    return section.model_copy(update={name: _with_setting(getattr(section, name), rest, value) if rest else value})


def with_data_found(config: RunConfig, folder: RunFolder) -> tuple[RunConfig, list[str]]:
    """A stored run's settings with its data folder as it is here, and what to know about it."""
    stored, here = config.data.dir, with_absolute_paths(config)
    demo = make_absolute(folder.path) / "data"  # demo data lie in the run's folder, and move with it
    if stored is None:
        return here.changed(data={"dir": str(demo)}) if demo.is_dir() else here, []
    place = Path(_absolute(stored))
    if place.exists():
        return here, []
    if demo.is_dir():
        return here.changed(data={"dir": str(demo)}), [f"{stored} is not there: using the demo data in {demo}"]
    if is_import_path(config.workload):  # what it means is its workload's own business
        return here, []
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
    place = make_absolute(path)
    return str(place) if place.exists() or not only_if_there else path


# --- sizes and times of its data files when it started ---
# Content is not read: one look at each file's entry. What it finds is said, never refused, since a copy of the data on
# another machine has other times and the same content.

SHOWN = 3


def record_data(workload: Workload, folder: RunFolder) -> None:
    """Remember the files; samples that are none leave nothing to remember."""
    files = list(_files(workload))
    if files:
        write_atomically(_place(folder), json.dumps({"files": len(files), "digest": _digest(files)}))


def digest_of_contents(workload: Workload) -> str:
    """Of the files' names and sizes, which copies on other machines share."""
    files = list(_files(workload))
    return _digest(files, with_times=False)[:12] if files else "none"


def changed_data(workload: Workload, folder: RunFolder) -> list[str]:
    """A note where sizes or times are others than when the run started; none for runs without a record."""
    try:
        record = parse_json(_place(folder).read_bytes())
        then, num_then = record["digest"], record["files"]
        started_s = _place(folder).stat().st_mtime
    except (OSError, ValueError, KeyError, TypeError):
        return []
    files = list(_files(workload))
    if _digest(files) == then:
        return []
    if len(files) != num_then:
        return [
            f"the run started with {format_count(num_then, 'data file')}, there are {len(files)} now: "
            "it does not continue exactly"
        ]
    newer = [path for path in dict.fromkeys(files) if path.stat().st_mtime > started_s]  # both parts may be in one file
    which = f"written since: {list_some(newer, SHOWN)}" if newer else "none was written since, so they may be copies"
    return [f"data files have other sizes or times than when this run started ({which}): it may not continue exactly"]


def _files(workload: Workload) -> Iterator[Path]:
    for samples in (workload.train_samples, workload.val_samples):
        if implements(samples, FileSamples):
            yield from map(Path, samples.files())


def _digest(files: list[Path], *, with_times: bool = True) -> str:
    digest = hashlib.sha256()
    for path in files:
        entry = path.stat()
        times = (entry.st_mtime_ns,) if with_times else ()
        # The folder's own name, not its whole path: a data set that was moved is the same one.
        digest.update(repr((path.parent.name, path.name, entry.st_size, *times)).encode())
    return digest.hexdigest()


def _place(folder: RunFolder) -> Path:
    return folder.path / "data.json"
