"""A bench as plain JSON: rows and all that they depend on."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import shlex
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import torch

from halfstep import __version__
from halfstep.bench.bench import LOSS_BOUND, BenchRequest, BenchResult
from halfstep.bench.peers import parse_peer_name
from halfstep.bench.problem import Problem
from halfstep.config.dump import dump_values
from halfstep.config.foreign import flatten_keys
from halfstep.config.keys import list_fields
from halfstep.config.schema import RunConfig
from halfstep.disk import write_atomically
from halfstep.errors import ConfigError
from halfstep.hardware.facts import Hardware
from halfstep.workloads import KINDS

VERSION: Literal[1] = 1
"""Of the file's layout."""
PACKAGES = {"lightning": ("lightning", "pytorch-lightning"), "accelerate": ("accelerate",)}
"""Names under which a peer may be installed."""
FILE_FLAGS = ("--save", "--picture")
DEFAULT_NAMES = {"--picture": "bench.png", "--save": "bench.json"}

Record = dict[str, Any]


def describe_circumstances(
    problem: Problem, request: BenchRequest, hardware: Hardware, flops: int, command: str
) -> Record:
    """All that the rows depend on, known before the first one is measured."""
    return {
        "bench": VERSION,
        "command": command,
        "date": time.strftime("%Y-%m-%d"),
        "device": hardware.name,
        "versions": collect_versions(hardware, request.against),
        "problem": describe_problem(problem, flops),
        "unit": asdict(problem.unit),
        "sample_size": KINDS.of(problem.config.workload).size_of_sample(problem.config),
        "steps": request.schedule.steps,
        "window_steps": request.schedule.window,
        "memory": explain_memory(hardware),
    }


def format_command_line(words: Sequence[str]) -> str:
    """What the user called, its files by name: where they lay on some machine is not part of a result to pass on."""
    return f"halfstep {shlex.join(_strip_folders(words))}"


def _strip_folders(words: Sequence[str]) -> Iterator[str]:
    is_file = False
    for word in words:
        flag, equals, value = word.partition("=")
        if is_file:
            yield Path(word).name
        else:
            yield f"{flag}={Path(value).name}" if equals and flag in FILE_FLAGS else word
        is_file = word in FILE_FLAGS


def summarise_results(benched: BenchResult) -> Record:
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


def describe_problem(problem: Problem, flops: int) -> dict[str, Any]:
    """What is trained: what a title names of it, and every setting."""
    config = problem.config
    threads = {"threads": torch.get_num_threads()} if problem.device.type == "cpu" else {}
    return {
        "workload": config.workload,
        "batch_size": config.train.batch_size,
        "image_size": config.data.image_size,
        "optimizer": config.optimizer.name,
        "clip_norm": config.train.clip_norm,
        "parameters": sum(parameter.numel() for parameter in problem.make_model().parameters()),
        "reduced": find_reduced_settings(config),
        "flops": flops,
        "config": dump_values(config),
        **threads,
    }


def find_reduced_settings(config: RunConfig) -> dict[str, Any]:
    """Model settings by which the demo's network differs from the one that the workload's name means."""
    fields, here = list_fields(type(config)), flatten_keys(config.model_dump(mode="json"))
    found = {}
    for path, value in type(config).demo.items():
        small, full = json.loads(json.dumps([value, fields[path].default]))
        if path.startswith("model.") and here[path] == small != full:
            found[path] = small
    return found


def collect_versions(hardware: Hardware, against: Sequence[str]) -> dict[str, str | None]:
    """Of everything that makes a step fast or slow."""
    found: dict[str, str | None] = {
        "halfstep": __version__,
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "driver": hardware.driver,
        "python": platform.python_version(),
    }
    return found | {name: _find_version(name) for name in map(parse_peer_name, against) if name in PACKAGES}


def _find_version(peer: str) -> str | None:
    for package in PACKAGES[peer]:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def explain_memory(hardware: Hardware) -> str:
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


def save_record(found: Record, path: Path) -> None:
    """Write the record, whole or not at all."""
    write_atomically(path, json.dumps(found, indent=2) + "\n", follows_links=True)
