"""The user's own data in place of a random batch: only they can be waited for."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from halfstep.bench.runner import Batch, Problem
from halfstep.data.loader import Loader
from halfstep.data.seeds import Key
from halfstep.errors import ConfigError
from halfstep.run.assemble import build_workload
from halfstep.workloads import load


def stated_folder(target: str, overrides: Sequence[str], flags: Mapping[str, object]) -> str | None:
    """`data.dir`, where the command line or the config file names one."""
    return load(target, flags=flags, overrides=overrides).config.data.dir


def refuse_peers(folder: str, against: Sequence[str]) -> None:
    """Raise ConfigError where somebody would be explained on other data than his neighbours."""
    if against:
        raise ConfigError(
            f"data.dir={folder} with --against {','.join(against)}",
            why="how a peer's user reads data is not known, so peers are given one random batch",
            fix="leave one of them out; data.dir=null where a config file names it",
        )


def on_own_data(problem: Problem, folder: str) -> Problem:
    """The problem as `halfstep train` would have it from this folder: its classes, its augmentation, its loader."""
    data = problem.config.data.model_copy(update={"dir": folder})
    config = problem.config.model_copy(update={"data": data})
    workload = build_workload(config)
    size, seed = config.train.batch_size, config.train.seed

    def prepare(batch: Batch) -> Batch:
        return workload.prepared(batch, key=Key.of_training(seed, 0), training=True)

    def loss(model: nn.Module, prepared: Batch) -> torch.Tensor:
        return workload.weighed_loss(workload.forward(model, prepared), prepared)[0]

    return dataclasses.replace(
        problem,
        config=config,
        make_model=lambda: copy.deepcopy(workload.model),
        host_batch=next(Loader(workload.train_samples, batch_size=size, seed=seed).epoch(0)),
        prepare=prepare,
        loss=loss,
        holds_tensors=bool(workload.frozen or workload.values),
        own_data=workload,
    )
