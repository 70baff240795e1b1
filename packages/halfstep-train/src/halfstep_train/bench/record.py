"""Record a benchmark as plain JSON: its rows and everything they depend on."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from halfstep import __version__
from halfstep.disk import write_atomically
from halfstep.hardware.device_facts import Hardware
from halfstep_train.bench.bench import LOSS_BOUND, BenchRequest, BenchResult
from halfstep_train.bench.peers import MODULES, parse_peer_name
from halfstep_train.bench.problem import Problem
from halfstep_train.config.dump import dump_values
from halfstep_train.config.foreign import flatten_keys
from halfstep_train.config.keys import list_fields
from halfstep_train.config.schema import RunConfig
from halfstep_train.workloads import KINDS

VERSION = 1
"""Version of the file's layout."""

Record = dict[str, Any]


def describe_circumstances(
    problem: Problem, request: BenchRequest, hardware: Hardware, flops: int, command: str
) -> Record:
    """Return everything the rows depend on, known before the first one is measured."""
    return {
        "bench": VERSION,
        "command": command,
        "date": time.strftime("%Y-%m-%d"),
        "device": hardware.name,
        "versions": collect_versions(hardware, request.against),
        "problem": describe_problem(problem, flops),
        "unit": asdict(problem.unit),
        "sample_size": KINDS.of(problem.config.workload).describe_sample_size(problem.config),
        "steps": request.schedule.steps,
        "window_steps": request.schedule.window,
        "memory": explain_memory(hardware),
    }


def summarise_results(benched: BenchResult) -> Record:
    """Return the rows, their references and warnings."""
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
    """Return what is trained: the facts of the title, and every setting."""
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
    """Return the model settings in which the demo's network is smaller than the workload's default."""
    fields, here = list_fields(type(config)), flatten_keys(config.model_dump(mode="json"))
    found = {}
    for path, value in type(config).demo.items():
        # Through JSON, which turns tuples into lists, so that equal values compare equal.
        small, full = json.loads(json.dumps([value, fields[path].default]))
        if path.startswith("model.") and here[path] == small != full:
            found[path] = small
    return found


def collect_versions(hardware: Hardware, against: Sequence[str]) -> dict[str, str | None]:
    """Return the versions of everything that affects the speed of a step."""
    found: dict[str, str | None] = {
        "halfstep": __version__,
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "driver": hardware.driver,
        "python": platform.python_version(),
    }
    peers = sorted({parse_peer_name(peer) for peer in against} & MODULES.keys())
    return found | {name: importlib.metadata.version(name) for name in peers}


def explain_memory(hardware: Hardware) -> str:
    """Explain what the memory column counts."""
    if hardware.kind == "cpu":
        return "not counted on a CPU: a process keeps the memory of earlier rows, so later ones would look larger"
    return "peak of torch's tensors while training, including captured graphs; reserved: all that torch reserved"


def save_record(found: Record, path: Path) -> None:
    """Write the record atomically."""
    write_atomically(path, json.dumps(found, indent=2) + "\n", follows_links=True)
