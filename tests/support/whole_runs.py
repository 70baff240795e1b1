"""Runs of the tiny workload, stopped, resumed and compared, for the tests of this folder."""

from __future__ import annotations

import json
import resource
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from halfstep.hardware.probe import probe
from halfstep.state_files import pack
from halfstep_train.config.schema import RunConfig
from halfstep_train.report.metrics_file import read
from halfstep_train.run.assemble import Assembly, assemble, build_workload, decide_plan
from halfstep_train.run.checkpoint import Checkpoint, Checkpoints
from halfstep_train.run.checkpoint import load as load_checkpoint
from halfstep_train.run.train import train
from halfstep_train.workloads import load
from halfstep_train.workloads.base.workload import Workload
from tiny_training import assert_same_bits

TINY = {"data.dir": "anywhere", "data.num_workers": 0, "device": "cpu", "log.quiet": True,
        "train.batch_size": 4, "precision.default": "fp32"}  # fmt: skip
"""22 samples: six steps an epoch."""


def config_of(settings: Mapping[str, Any], workload: str = "tiny_workload:build") -> RunConfig:
    return load(workload, overrides=[f"{key}={json.dumps(value)}" for key, value in settings.items()]).config


def assemble_run(config: RunConfig, workload: Workload | None = None) -> Assembly:
    """The parts of a run on the CPU, without its loop."""
    workload = build_workload(config) if workload is None else workload
    return assemble(config, workload, decide_plan(config, workload, probe("cpu")))


def run(out: Path, settings: dict[str, Any], workload: str = "tiny_workload:build") -> Path:
    overrides = [f"{key}={json.dumps(value)}" for key, value in {**TINY, **settings}.items()]
    return train(load(workload, overrides=overrides), out=out)


def resume(folder: Path, *overrides: str, allow_changes: bool = False) -> Path:
    loaded = load(str(folder / "config.yaml"), overrides=overrides)
    return train(loaded, resume=folder, allow_changes=allow_changes)


def newest(folder: Path) -> Checkpoint:
    return load_newest(Checkpoints(folder / "checkpoints"))[1]


def load_newest(checkpoints: Checkpoints, on_damaged: Callable[[str], object] = pytest.fail) -> tuple[Path, Checkpoint]:
    path = checkpoints.find_newest(on_damaged=on_damaged)
    return path, load_checkpoint(path)


def final_state(folder: Path) -> tuple[dict[str, torch.Tensor], str]:
    """Every tensor and every number of the last checkpoint."""
    checkpoint = newest(folder)
    checkpoint.state["journal"].pop("elapsed_s")
    checkpoint.state.pop("waiting")  # a clock's too
    plain, tensors = pack(checkpoint.state)
    named = {f"model.{k}": v for k, v in checkpoint.model.items()} | {f"ema.{k}": v for k, v in checkpoint.ema.items()}
    return named | tensors, json.dumps(plain, sort_keys=True)


def records(folder: Path) -> list[dict[str, Any]]:
    """Without what a clock or the machine decides."""
    clocks = ("_per_s", "memory_bytes", "elapsed_s", "left_s")
    return [{name: value for name, value in line.items() if not name.endswith(clocks)} for line in stored_lines(folder)]


def stored_lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def events(folder: Path, name: str) -> list[dict[str, Any]]:
    return [record for record in read(folder / "metrics.jsonl") if record.get("event") == name]


def learning_rates(folder: Path) -> list[float]:
    return [record["lr"] for record in read(folder / "metrics.jsonl") if record["kind"] == "train"]


def assert_same_run(left: Path, right: Path) -> None:
    (tensors, plain), (other_tensors, other_plain) = final_state(left), final_state(right)
    assert_same_bits(tensors, other_tensors)
    assert plain == other_plain
    assert records(left) == records(right)


@contextmanager
def small_disk(limit_bytes: int) -> Iterator[None]:
    """A limit on the size of files is the nearest thing to a full disk that a test may have."""
    former = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, former[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, former)
        signal.signal(signal.SIGXFSZ, ignored)
