"""The folder of a run: `config.yaml plan.json metrics.jsonl checkpoints/ report/ model/`. It is never overwritten.
A resumed run may change some of its settings.

Nothing here imports torch at the top, so that commands refuse missing and existing paths in a fraction of a second.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import operator
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import ValidationError

from halfstep.disk import (
    find_unused_path,
    is_dry_run,
    lock_folder,
    make_absolute,
    parse_json,
    read_sealed,
    seal,
    write_atomically,
)
from halfstep.errors import (
    CheckpointError,
    DataError,
    HardwareError,
    ModelError,
    format_count,
    suggest_command,
)
from halfstep.hardware.probe import probe
from halfstep.precision.plan import Plan
from halfstep_train.config.dump import dump_values, to_yaml
from halfstep_train.config.load import Loaded
from halfstep_train.config.schema import WITHOUT_END, RunConfig, is_import_path
from halfstep_train.config.section import IS_PATH, MAY_BE_MISSING
from halfstep_train.config.statements import Origin, list_fields
from halfstep_train.config.yaml_source import read_yaml
from halfstep_train.workloads import DEMO_WORKLOAD, KINDS, load
from halfstep_train.workloads.base.import_path import refuse_unknown_code, sign_code

if TYPE_CHECKING:
    from halfstep.distributed.world import World
    from halfstep_train.run.checkpoint import Checkpoints
    from halfstep_train.workloads.base.workload import Workload


@dataclass(frozen=True, kw_only=True, slots=True)
class Settled:
    """The content of settled.json: the run's settings, stored separately because users may edit config.yaml."""

    settings: dict[str, Any]
    """All settings that the run was last trained with."""
    decided: dict[str, list[Any]]
    """Settings that the run decided itself, by path, with the requested value."""
    code: dict[str, str]
    """Signatures of the custom code that the run was trained with, by import path."""
    before: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    """Settings before each resume that changed some, oldest first, and `until` which step they were used."""


class RunFolder:
    """The paths in a run's folder, and how its records are read and written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config, self.plan, self.metrics = path / "config.yaml", path / "plan.json", path / "metrics.jsonl"
        self.report = path / "report"
        self.model = path / "model"
        """The folder of the exported model, for families that have an export format."""

    def write_settings(
        self, config: RunConfig, plan: Plan, decided: dict[str, list[Any]], before: Sequence[dict[str, Any]] = ()
    ) -> None:
        """Write settled.json, plan.json and config.yaml."""
        config = config.replace(log={"quiet": False, "verbose": False})
        code = sign_code(find_import_paths(config))
        self.write_settled(Settled(settings=dump_values(config), decided=decided, code=code, before=list(before)))
        self.write_plan(plan)
        write_atomically(self.config, to_yaml(config))  # last, because a folder with this file counts as a run

    def write_settled(self, settled: Settled) -> None:
        write_atomically(self.path / "settled.json", json.dumps(seal(dataclasses.asdict(settled))))

    def read_settled(self) -> Settled:
        return Settled(**self._read_sealed(self.path / "settled.json"))

    def write_plan(self, plan: Plan) -> None:
        write_atomically(self.plan, json.dumps(seal(dataclasses.asdict(plan)), indent=2))

    def read_plan(self) -> Plan:
        return Plan.from_json(json.dumps(self._read_sealed(self.plan)))

    def _read_sealed(self, path: Path) -> dict[str, Any]:
        try:
            return read_sealed(path.read_bytes())
        except (OSError, ValueError) as error:
            why = (error.strerror if isinstance(error, OSError) else None) or str(error)
            again = suggest_command("train", self.config, "--out", "DIR")
            raise CheckpointError(
                f"cannot use {path}", why=why, fix=f"restore the file, or start a new run: {again}"
            ) from error

    def open_checkpoints(self, *, keep: int = 0, writes: bool = True, world: World | None = None) -> Checkpoints:
        from halfstep_train.run.checkpoint import Checkpoints

        return Checkpoints(self.path / "checkpoints", keep=keep, writes=writes, world=world)

    def lock(self) -> AbstractContextManager[None]:
        return lock_folder(self.path)

    @classmethod
    def create(cls, out: str | None, name: str) -> RunFolder:
        """Create a new folder; an existing one with content is an error, a default name that is taken gets a number."""
        path = Path(out) if out else find_unused_path(Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}")
        refuse_used_folder(path)
        (path / "report").mkdir(parents=True)
        return cls(path)

    @classmethod
    def open(cls, path: str) -> RunFolder:
        folder = cls(Path(path))
        if not folder.config.is_file():
            raise CheckpointError(
                f"{path} is not a run folder: it has no config.yaml",
                fix="give the folder that `halfstep train` printed",
            )
        return folder


def find_import_paths(config: RunConfig) -> list[str]:
    """Return the import paths of custom code that a config names."""
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
    """Load the config of a stored run or capsule.

    Custom code that this user did not train with is refused before anything is imported, unless `trust` is set.
    """
    workload = read_yaml(file).values.get("workload")
    # A list, because `in KINDS` would import the code. A reference such as `${globals.x}` is refused as well.
    if not trust and workload is not None and str(workload) not in list(KINDS):
        refuse_unknown_code([str(workload)], code, file)
    loaded = load(str(file), flags=flags, overrides=overrides)
    if not trust:
        refuse_unknown_code(find_import_paths(loaded.config), code, file)
    return loaded


def load_target(source: str, *, flags: Mapping[str, object], overrides: Sequence[str], trust: bool = False) -> Loaded:
    """Load the config of a run's folder, a config file or a workload; refuse paths in it that do not exist."""
    path = Path(source)
    if is_run(source):
        folder = RunFolder(path)
        return load_stored(folder.config, folder.read_settled().code, trust=trust, flags=flags, overrides=overrides)
    is_missing = not path.exists() and len(path.parts) > 1 and path.suffix not in (".yaml", ".yml")
    if path.is_dir() or is_missing:
        raise CheckpointError(
            f"{source} is not a run",
            why="there is no such folder" if is_missing else "config.yaml is missing",
            fix=f"give a folder that `halfstep train` created, a config file, or a workload such as {DEMO_WORKLOAD}",
        )
    loaded = load(source, flags=flags, overrides=overrides)
    refuse_missing_paths(loaded.config)
    return loaded


def is_run(source: str) -> bool:
    return (Path(source) / "config.yaml").is_file()


def refuse_used_folder(path: Path) -> None:
    """Raise CheckpointError if results cannot be written to this folder: it is not empty, or inside a file."""
    if path.is_dir() and any(path.iterdir()):
        fix = "choose another --out"
        if any((path / "checkpoints").glob("*/")):
            fix += f", or continue that run with: {suggest_command('train', '--resume', path)}"
        raise CheckpointError(f"{path} already exists and is not empty", why="files are never overwritten", fix=fix)
    existing = next(parent for parent in (path, *path.parents) if parent.exists())
    if not existing.is_dir():
        raise CheckpointError(f"cannot create the folder {path}: {existing} is a file", fix="choose another --out")


def suggest_resume(path: Path, world: World | None = None) -> str:
    """Return the command that resumes a run of these ranks which stopped before its end."""
    if is_dry_run(path):
        return "--dry removes the run's folder: leave --dry out to be able to continue"
    ranks = ["--gpus", world.size] if world is not None and world.size > 1 and world.is_on_one_host else []
    return f"continue with: {suggest_command('train', '--resume', path, *ranks)}"


def name_run(workload: str) -> str:
    return workload.replace(":", "-").replace("/", "-")


def point_to_demo_data(loaded: Loaded, data_dir: Path) -> Loaded:
    origins = {**loaded.origins, "data.dir": Origin(layer="default", where="generated demo data")}
    return dataclasses.replace(loaded, config=loaded.config.replace(data={"dir": str(data_dir)}), origins=origins)


# --- settings in the folder ---


class RunSource(NamedTuple):
    """From what a capsule builds its run again."""

    config: str  # as YAML
    code: Mapping[str, str]  # signatures of custom code, by import path
    base_lr: float

    @classmethod
    def of(cls, config: RunConfig) -> RunSource:
        return cls(to_yaml(config), sign_code(find_import_paths(config)), config.optimizer.lr)


def find_settled(asked: RunConfig, config: RunConfig) -> dict[str, list[Any]]:
    """Return the settings that a new run decided from its data or demo, by path, with the requested value if any."""
    then, now = dump_values(asked), dump_values(config)
    sections = {name: part for name, part in then.items() if isinstance(part, dict)}
    return {
        f"{section}.{name}": [value] if is_given(asked, section, name) else []
        for section, part in sections.items()
        for name, value in part.items()
        if value != now[section][name]
    }


def is_given(config: RunConfig, section: str, name: str) -> bool:
    return name in getattr(config, section).model_fields_set


# --- paths in the config, and data that were moved ---

RANDOM = "random"
"""Value of a setting for weights that asks for random ones instead of a file."""


def make_paths_absolute(config: RunConfig) -> RunConfig:
    """Make paths independent of the working folder; `~` is the home folder."""
    is_own = is_import_path(config.workload)
    for path, field in list_fields(type(config)).items():
        if IS_PATH in field.metadata and (value := operator.attrgetter(path)(config)):
            # Some settings take a path or a name (`random`). A missing file stays as typed, for the error message.
            absolute = _make_absolute(value, only_if_there=is_own or not path.startswith("data."))
            config = _change_setting(config, path.split("."), absolute)
    return config


def refuse_missing_paths(config: RunConfig) -> None:
    """Raise if a setting of a new run names a file or folder that does not exist.

    A custom workload may use its settings as it likes, so its builder checks them.
    """
    if is_import_path(config.workload):
        return
    for path, field in list_fields(type(config)).items():
        value = operator.attrgetter(path)(config) if IS_PATH in field.metadata else None
        may_be_missing = MAY_BE_MISSING in field.metadata or value == RANDOM
        if not value or may_be_missing or "://" in value or make_absolute(value).exists():
            continue
        if path == "data.dir":
            what = f"data folder {make_absolute(value)} does not exist"
            raise DataError(what, fix="check --data-dir (data.dir); leave it out to train on demo data")
        error = ModelError if path.startswith("model.") else DataError
        raise error(f"{path}={value}: there is no such file or folder", fix=f"check the path, or leave {path} out")


def _change_setting(section: Any, names: Sequence[str], value: str) -> Any:
    name, *rest = names
    return section.model_copy(update={name: _change_setting(getattr(section, name), rest, value) if rest else value})


def find_moved_data(config: RunConfig, folder: RunFolder) -> tuple[RunConfig, list[str]]:
    """Return a stored run's config with its data folder as found here, and notes about it."""
    stored, here = config.data.dir, make_paths_absolute(config)
    demo = make_absolute(folder.path) / "data"  # demo data are in the run's folder and move with it
    if stored is None:
        return here.replace(data={"dir": str(demo)}) if demo.is_dir() else here, []
    if Path(_make_absolute(stored)).exists():
        return here, []
    if demo.is_dir():
        return here.replace(data={"dir": str(demo)}), [f"{stored} does not exist: using the demo data in {demo}"]
    if is_import_path(config.workload):  # a custom workload may use data.dir as it likes
        return here, []
    raise DataError(
        f"the run's data folder {stored} does not exist",
        why=f"{folder.config} names that folder",
        fix="give the new location: --data DIR to evaluate, data.dir=DIR to resume",
    )


def _make_absolute(path: str, *, only_if_there: bool = False) -> str:
    if "://" in path:
        return path
    absolute = make_absolute(path)
    return str(absolute) if absolute.exists() or not only_if_there else path


# --- sizes and times of the data files when the run started ---
# Only sizes and times are compared, not contents. Differences are reported but not refused, because a copy of the data
# on another machine has other times and the same content.

DATA_RECORD = "data.json"


def record_data(workload: Workload, folder: RunFolder) -> None:
    """Record the data files in data.json; samples that are not files leave no record."""
    files = list(_list_files(workload))
    if files:
        write_atomically(folder.path / DATA_RECORD, json.dumps({"files": len(files), "digest": _compute_digest(files)}))


def digest_contents(workload: Workload) -> str:
    """Return a digest of the files' names and sizes, which are the same for copies on other machines."""
    files = list(_list_files(workload))
    return _compute_digest(files, with_times=False)[:12] if files else "none"


def describe_changed_data(workload: Workload, folder: RunFolder) -> list[str]:
    """Return a note if sizes or times of the data files have changed since the run started."""
    try:
        then = parse_json((folder.path / DATA_RECORD).read_bytes())["digest"]
    except (OSError, ValueError, KeyError, TypeError):
        return []
    if _compute_digest(list(_list_files(workload))) == then:
        return []
    return ["data files changed in name, size or time since this run started: it may not continue exactly"]


def _list_files(workload: Workload) -> Iterator[Path]:
    from halfstep_train.data.loader import FileSamples, implements

    for samples in (workload.train_samples, workload.val_samples):
        if implements(samples, FileSamples):
            yield from map(Path, samples.files())


def _compute_digest(files: list[Path], *, with_times: bool = True) -> str:
    digest = hashlib.sha256()
    for path in files:
        entry = path.stat()
        times = (entry.st_mtime_ns,) if with_times else ()
        # The name of the folder, not its whole path: a data set that was moved is still the same.
        digest.update(repr((path.parent.name, path.name, entry.st_size, *times)).encode())
    return digest.hexdigest()


# --- settings that may change when a run is resumed ---


FREE = (
    "train.epochs", "train.max_steps", "train.early_stopping_patience", "train.checkpoint_every",
    "train.checkpoints_total_limit", "train.report_every", "train.validate_every", "train.sample_every",
    "train.auto_batch", "train.callbacks", "train.backend", "train.rank_timeout_s", "train.find_unused",
    "data.num_workers", "data.dir", "log.", "globals",
)  # fmt: skip
"""Settings that may change: they affect only how long a run trains, where it runs, or what it reports.

A schedule that depends on the run's length changes with `train.epochs` and `train.max_steps`, which is reported."""

NOT_STORED = ("log.quiet", "log.verbose")  # properties of one call, not of the run

FOLLOWS_THE_LENGTH = ("cosine", "linear", "polynomial", "onecycle")  # schedules that end where the run ends

KEPT = ("model.weights",)


@dataclass(frozen=True, kw_only=True, slots=True)
class Changes:
    """The settings that differ between a stored run and its resumption."""

    keys: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def touch(self, *prefixes: str) -> bool:
        """True if settings that start with these names changed in a way that affects what a step computes."""
        return any(key.startswith(prefixes) and not key.startswith(FREE) for key in self.keys)


def flatten_settings(config: RunConfig) -> dict[str, Any]:
    return {path: attrgetter(path)(config) for path in list_fields(type(config))}


def accept_changes(loaded: Loaded, folder: RunFolder, *, allow: bool) -> tuple[Loaded, Settled, Changes]:
    """Return the settings of a resumed run, those that it stored, and how they differ; refuse what must not change."""
    own, settled = load(str(folder.config)), folder.read_settled()
    # What the run decided itself (from its data) is not a change of the user.
    loaded = apply_decided(loaded, own, settled.decided)
    kept = KINDS.of(own.config.workload).kept
    trained = recover_settings(settled.settings, own.config, folder.config, allow=allow, kept=kept)
    # Compare absolute paths: the run may be resumed from another folder.
    stored, asked = (make_paths_absolute(one) for one in (trained, loaded.config))
    return loaded, settled, refuse_changes(stored, asked, allow=allow, kept=kept)


def apply_decided(asked: Loaded, stored: Loaded, settled: Mapping[str, Sequence[Any]]) -> Loaded:
    """Use what the run decided when it started for settings that are not given, or given as they were then."""
    config, given, taken = asked.config, dump_values(asked.config), list[str]()
    # Another number of ranks may continue the run, with the run's batch.
    totals = {path: (attrgetter(path)(asked.config), attrgetter(path)(stored.config)) for path in asked.per_rank}
    for path, values in {**settled, **totals}.items():
        section, _, name = path.partition(".")
        if name in given.get(section, ()) and (not is_given(config, section, name) or given[section][name] in values):
            config = config.replace(**{section: {name: getattr(getattr(stored.config, section), name)}})
            taken.append(f"{path}.")
    # The dot keeps `data.dir` from matching `data.directory`.
    own = tuple(taken)
    origins = {key: origin for key, origin in asked.origins.items() if not f"{key}.".startswith(own)}
    origins |= {key: origin for key, origin in stored.origins.items() if f"{key}.".startswith(own)}
    overridden = tuple(one for one in asked.overridden if not f"{one.key}.".startswith(own))
    warnings = [
        f"{path} stays {kept}, although {asked.origins[path]} is {now}; {path}=N --allow-changes changes it"
        for path, (now, kept) in totals.items()
        if now != kept
    ]
    warnings = [*asked.warnings, *warnings]
    return replace(asked, config=config, origins=origins, overridden=overridden, warnings=tuple(warnings), per_rank=())


def recover_settings(
    settings: Mapping[str, Any], own: RunConfig, file: Path, *, allow: bool, kept: Sequence[str] = ()
) -> RunConfig:
    """Return the settings the run was last trained with; edits of config.yaml are checked like other changes."""
    if own.workload != settings["workload"]:
        raise CheckpointError(
            f"{file} was edited: workload: {settings['workload']} -> {own.workload}",
            why="the checkpoints belong to another model",
            fix="undo the edit, or start a new run",
        )
    try:
        stored = type(own).model_validate(settings)
    except ValidationError as error:
        names = ", ".join(".".join(map(str, detail["loc"])) for detail in error.errors())
        raise CheckpointError(
            f"{file.parent} has settings that this version of halfstep does not know: {names}",
            why="another version wrote the run",
            fix="resume it with that version, or start a new run",
        ) from error
    refuse_changes(stored, own, allow=allow, kept=kept, edited=file)
    return stored


def refuse_changes(
    stored: RunConfig, asked: RunConfig, *, allow: bool, kept: Sequence[str] = (), edited: Path | None = None
) -> Changes:
    """Return the differences between two configs; refuse those that must not change.

    Changes that affect what a step computes are refused unless allowed. Changes of settings or sections in `kept` are
    always refused, because these are not read again. `edited` is the file with the changes; None: the command line.
    """
    before, now = flatten_settings(stored), flatten_settings(asked)
    changed = [key for key in now if now[key] != before.get(key) and key not in NOT_STORED]
    notes = [f"{key}: {before.get(key)} -> {now[key]}" for key in changed]
    undo = ("put it back", "put them back") if edited else ("leave it out", "leave them out")
    if held := [note for key, note in zip(changed, notes, strict=True) if key.startswith((*KEPT, *kept))]:
        raise CheckpointError(
            f"this setting cannot change during a run{f', and {edited} was edited' if edited else ''}: "
            + "; ".join(held),
            why="it was applied when the run started, and the checkpoint depends on it",
            fix=f"{undo[0]}, or start a new run",
        )
    binding = [note for key, note in zip(changed, notes, strict=True) if not key.startswith(FREE)]
    if binding and not allow:
        what = f"{edited} was edited" if edited else "this run was started with different settings"
        raise CheckpointError(
            f"{what}: {'; '.join(binding)}",
            why="with different settings, a resumed run would not continue exactly",
            fix=f"{undo[1]}, or accept them with --allow-changes",
        )
    return Changes(keys=tuple(changed), notes=(*notes, *_describe_schedule_change(asked, changed)))


def _describe_schedule_change(config: RunConfig, changed: list[str]) -> list[str]:
    if not {"train.epochs", "train.max_steps"} & set(changed):
        return []
    s = config.schedule
    followers = [f"the {s.name} schedule"] if s.name in FOLLOWS_THE_LENGTH else []
    # Warmup by epochs is at most a tenth of the run.
    followers += ["the warmup"] if s.warmup_steps is None and s.warmup_epochs > 0 else []
    return [f"{name} depends on the length of the run: learning rates change from here on" for name in followers]


def refuse_changed_data(stored: Sequence[int], found: Sequence[int], *, allow: bool) -> list[str]:
    """Refuse other numbers of samples: the split would differ, and validation might contain training samples."""
    if list(stored) == list(found):
        return []
    note = f"the data changed: {stored[0]} training and {stored[1]} validation samples became {found[0]} and {found[1]}"
    if not allow:
        raise CheckpointError(
            note,
            why="samples would be counted and split differently, so the run could not be continued exactly",
            fix="restore the data, or accept the change with --allow-changes",
        )
    return [note]


def refuse_missing_device(plan: Plan) -> None:
    """Raise if this machine lacks the run's device: another one rounds differently, so the user must ask for it."""
    try:
        probe(plan.device)
    except HardwareError as error:
        raise CheckpointError(
            f"this run was trained on {plan.device} ({plan.device_name}), which this machine does not have",
            why=error.why,
            fix=f"--device {probe().device} --allow-changes continues there, but not bit-exactly",
        ) from error


def explain_finished(config: RunConfig, state: Mapping[str, Any]) -> str:
    """Return why the run has finished and how to continue anyway; empty if something is left to do."""
    train, epochs, steps = config.train, state["position"]["epoch"], state["step"]["attempted"]
    all_epochs, more = format_count(train.epochs, "epoch"), ""
    if epochs >= train.epochs:
        end, again = f"after {epochs} of {all_epochs}", f"train.epochs={2 * epochs}"
    elif 0 < train.max_steps <= steps:
        end, again = f"after {steps} of {format_count(train.max_steps, 'step')}", f"train.max_steps={2 * steps}"
        more = "" if train.epochs == WITHOUT_END else f", or 0 for all {all_epochs}"
    elif 0 < train.early_stopping_patience <= state["stopping"]["num_since"]:
        end, again = f"by early stopping after {epochs} of {all_epochs}", "train.early_stopping_patience=0"
    else:
        return ""
    return f"finished {end}; to continue, add {again} to the command{more}"
