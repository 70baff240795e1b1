"""A bench as plain JSON: rows and all that they depend on. `--save` writes it, `--baseline` reads and checks it."""

from __future__ import annotations

import functools
import importlib.metadata
import json
import operator
import platform
import shlex
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError, model_validator
from pydantic_core import ErrorDetails

from halfstep import __version__
from halfstep.bench.bench import LOSS_BOUND, Benched, Request
from halfstep.bench.peers import peer_name
from halfstep.bench.problem import Problem
from halfstep.bench.row import Row
from halfstep.config.dump import plain
from halfstep.config.keys import fields_of
from halfstep.config.schema import RunConfig
from halfstep.disk import write_whole
from halfstep.errors import CheckpointError, ConfigError
from halfstep.hardware.facts import Hardware
from halfstep.workloads import KINDS

VERSION: Literal[1] = 1
"""Of the file's layout."""
NOT_OURS = "it is JSON of another kind, or of another version's bench"
SHOWN = 40
"""Characters of a value that is wrong."""

Milliseconds = Annotated[float, Field(ge=1e-6, le=1e9)]
"""Of a step: none takes less than a nanosecond, and nobody waits eleven days."""


class StoredRow(BaseModel):
    """What a comparison reads of a row."""

    model_config = ConfigDict(frozen=True)
    name: str
    variant: str
    precision: str
    reason: str
    simulated: bool
    window_ms: tuple[Milliseconds, ...]
    peak_bytes: Annotated[int, Field(ge=0)] | None

    @model_validator(mode="after")
    def _is_measured_or_says_why_not(self) -> StoredRow:
        if not self.window_ms and not self.reason:
            raise ValueError("window_ms is empty and no reason says why")
        return self

    def row(self) -> Row:
        """Without what is not compared."""
        return Row(**dict(self))


class StoredProblem(BaseModel):
    """What was trained; older files do not tell all settings."""

    model_config = ConfigDict(frozen=True, extra="allow")
    __pydantic_extra__: dict[str, JsonValue]
    settings: dict[str, JsonValue] = {}


class Stored(BaseModel):
    """An earlier bench."""

    model_config = ConfigDict(frozen=True)
    device: str
    versions: dict[str, str | None]
    problem: StoredProblem
    rows: tuple[StoredRow, ...]
    repeated: StoredRow | None = None


def read(path: Path) -> Stored:
    """What `--save` wrote; CheckpointError tells what is wrong with any other file."""
    try:
        text = path.read_text()
        found = json.loads(text)
    except OSError as error:
        raise _no_record(path, f"it cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise _no_record(path, "it is not text") from error
    except RecursionError as error:
        raise _no_record(path, NOT_OURS) from error
    except ValueError as error:
        raise _no_record(path, f"it is not JSON: {error}" if text.strip() else "it is empty") from error
    if not isinstance(found, dict) or found.get("bench") != VERSION:
        is_explained = isinstance(found, dict) and "explained" in found
        raise _no_record(path, "it is one of --explain, without times to compare" if is_explained else NOT_OURS)
    try:
        # From the text, where a list may be a tuple; of Python's own types strictness takes none for another.
        return Stored.model_validate_json(text, strict=True)
    except ValidationError as error:
        raise _no_record(path, _complaint(error.errors()[0])) from error


def _complaint(detail: ErrorDetails) -> str:
    """`rows.0.window_ms.2 is "abc": input should be a valid number`."""
    where, said = ".".join(map(str, detail["loc"])), detail["msg"]
    if detail["type"] == "missing":
        return f"{where} is missing"
    if detail["type"] == "value_error":
        return f"{where}: {detail['ctx']['error']}"
    return f"{where} is {_shown(detail['input'])}: {said[:1].lower()}{said[1:]}"


def _shown(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 1]}…"


def _no_record(path: Path, why: str) -> CheckpointError:
    return CheckpointError(
        f"--baseline {path} is not a file of halfstep bench --save",
        why=why,
        fix="save one first: the same command with --save NEW.json in place of --baseline",
    )


PACKAGES = {"lightning": ("lightning", "pytorch-lightning"), "accelerate": ("accelerate",)}
"""Names under which a peer may be installed."""
FILE_FLAGS = ("--save", "--picture", "--baseline")
SHORT_NAMES = {
    "workload": "workload",
    "batch_size": "train.batch_size",
    "image_size": "data.image_size",
    "optimizer": "optimizer.name",
    "clip_norm": "train.clip_norm",
    "memory": "train.memory",
    "activation_checkpointing": "train.activation_checkpointing",
    "ema": "ema.enabled",
}
"""Settings that stand at the top of a problem; all others that a step depends on are in its `settings`."""
NOT_OF_THE_STEP = (
    *("preset", "device", "globals", "log.", "data."),
    *("precision.default", "precision.strict", "precision.simulate", "train.fast"),
    *(
        "train.early_stopping_patience",
        "train.validate_every",
        "train.sample_every",
        "train.checkpoint",
        "train.report_every",
    ),
)
"""What a bench does not read, and what its rows and its device are named by. Channels of the data show in the model."""
DEFAULT_NAMES = {"--picture": "bench.png", "--save": "bench.json"}

Record = dict[str, Any]


def circumstances(problem: Problem, request: Request, hardware: Hardware, flops: int, command: str) -> Record:
    """All that the rows depend on, known before the first one is measured."""
    return {
        "bench": VERSION,
        "command": command,
        "date": time.strftime("%Y-%m-%d"),
        "device": hardware.name,
        "versions": versions(hardware, request.against),
        "problem": identity(problem, flops),
        "unit": asdict(problem.unit),
        "sample_size": KINDS.of(problem.config.workload).size_of_sample(problem.config),
        "steps": request.schedule.steps,
        "window_steps": request.schedule.window,
        "memory": memory_meaning(hardware),
    }


def command_line(words: Sequence[str]) -> str:
    """What the user called, its files by name: where they lay on some machine is not part of a result to pass on."""
    return f"halfstep {shlex.join(_files_by_name(words))}"


def _files_by_name(words: Sequence[str]) -> Iterator[str]:
    is_file = False
    for word in words:
        flag, equals, value = word.partition("=")
        if is_file:
            yield Path(word).name
        else:
            yield f"{flag}={Path(value).name}" if equals and flag in FILE_FLAGS else word
        is_file = word in FILE_FLAGS


def results(benched: Benched) -> Record:
    """What was measured, and what it says."""
    return {
        "loss_reference": benched.reference,
        "loss_bound": LOSS_BOUND,
        "speedup_bases": dict(benched.bases),
        "rows": [row.to_dict() for row in benched.rows],
        "repeated": benched.repeated.to_dict() if benched.repeated else None,
        "warnings": list(benched.warnings),
        "stopped": benched.is_stopped,
    }


def identity(problem: Problem, flops: int) -> dict[str, Any]:
    """What must be equal for two times to be comparable."""
    settings = all_settings(problem.config)
    others = [path for path in settings if path not in SHORT_NAMES.values() and not path.startswith(NOT_OF_THE_STEP)]
    threads = {"threads": torch.get_num_threads()} if problem.device.type == "cpu" else {}
    return {
        **{name: settings[path] for name, path in SHORT_NAMES.items()},
        "parameters": sum(parameter.numel() for parameter in problem.make_model().parameters()),
        "flops": flops,
        "settings": {path: settings[path] for path in others} | threads,
    }


def all_settings(config: RunConfig) -> dict[str, Any]:
    """Every setting by its full path, in plain JSON types."""
    tree = plain(config)
    return {path: functools.reduce(operator.getitem, path.split("."), tree) for path in fields_of(type(config))}


def versions(hardware: Hardware, against: Sequence[str]) -> dict[str, str | None]:
    """Of everything that makes a step fast or slow."""
    found: dict[str, str | None] = {
        "halfstep": __version__,
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "driver": hardware.driver,
        "python": platform.python_version(),
    }
    return found | {name: _version_of(name) for name in map(peer_name, against) if name in PACKAGES}


def _version_of(peer: str) -> str | None:
    for package in PACKAGES[peer]:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def memory_meaning(hardware: Hardware) -> str:
    """What the column of memory counts."""
    if hardware.kind == "cpu":
        return "not counted on a CPU, where a process keeps what earlier rows took and later ones would look larger"
    return "peak of torch's tensors while training, what captured graphs hold included; reserved: all that torch took"


def refuse_to_overwrite(paths: Mapping[str, Path | None], *, force: bool) -> None:
    """Before minutes of measuring, by option: a file that is there, or a folder that is not."""
    for option, path in paths.items():
        if path is None:
            continue
        said, folder = f"{option} {path}", path.parent
        if path.is_dir():
            raise ConfigError(f"{said} is a folder", fix=f"name a file in it: {option} {path / DEFAULT_NAMES[option]}")
        if path.exists() and not force:
            raise ConfigError(f"{said} exists already", fix="another name, or --force to overwrite it")
        if path.exists() and not path.is_file():
            raise ConfigError(f"{said} is not an ordinary file", fix="another name")
        if not folder.is_dir():
            missing = "is a file, not a folder" if folder.exists() else "does not exist"
            fix = "another name" if folder.exists() else f"make it first: mkdir -p {shlex.quote(str(folder))}"
            raise ConfigError(f"{said} cannot be written", why=f"the folder {folder} {missing}", fix=fix)
        try:
            tempfile.TemporaryFile(dir=folder).close()
        except OSError as error:
            why = f"nothing can be written into {folder}: {error.strerror}"
            raise ConfigError(f"{said} cannot be written", why=why, fix="a name in another folder") from error


def save(found: Record, path: Path) -> None:
    """Write the record, whole or not at all."""
    write_whole(path, json.dumps(found, indent=2) + "\n")
