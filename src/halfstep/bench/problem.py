"""A workload on random data: its real model, loss and preparation, and no folder of data."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor

from halfstep.bench.runner import Batch, Problem
from halfstep.config.schema import RunConfig
from halfstep.errors import ConfigError
from halfstep.step.batches import batch_length
from halfstep.step.randomness import seed_everything
from halfstep.step.values import set_to_
from halfstep.workloads import KINDS
from halfstep.workloads.kind import Kind
from halfstep.workloads.workload import Workload

NUM_BATCHES = 10_000
"""Length of the pretended data set, that of ImageNet in batches of 128: `auto` weighs its trials against the run."""


class RandomSamples:
    """A data set whose samples are those of one batch, over and over."""

    def __init__(self, batch: Batch) -> None:
        self.values = batch  # not `batch`: samples with that name make whole batches themselves
        self.size = batch_length(batch)

    def __len__(self) -> int:
        return NUM_BATCHES * self.size

    def sample(self, index: int, *, key: tuple[int, int, int]) -> dict[str, Tensor]:
        del key
        return {name: tensor[index % self.size] for name, tensor in self.values.items() if name != "index"}


def problem_for(config: RunConfig, device: torch.device) -> Problem:
    """What everybody who is timed gets: weights, one pinned batch, preparation and loss."""
    kind = kind_with_random_data(config)
    workload = random_workload(config)
    for part in workload.frozen.values():  # peers autocast them; ours are built again and placed by the plan
        part.module.to(device).eval().requires_grad_(False)
    set_to_(workload.values, 0, device)
    batch = kind.make_batch(config, workload.store)
    if device.type == "cuda":
        batch = {name: tensor.pin_memory() for name, tensor in batch.items()}
    samples = config.train.batch_size
    return Problem(
        config=config,
        make_model=lambda: copy.deepcopy(workload.model),
        host_batch=batch,
        prepare=_preparation(kind, workload, device),
        loss=lambda model, prepared: workload.weighed_loss(workload.forward(model, prepared), prepared)[0],
        device=device,
        lr=config.optimizer.peak_lr(samples),
        weight_decay=config.optimizer.weight_decay,
        clip_norm=config.train.clip_norm,
        samples=samples,
        num_phases=max(len(workload.phases), 1),
        unit=kind.unit_of(config, workload.store),
        holds_tensors=bool(workload.frozen or workload.values),
    )


def random_workload(config: RunConfig) -> Workload:
    """The workload as a run would build it, with its seeded weights, but for augmentation."""
    kind = kind_with_random_data(config)
    seed_everything(config.train.seed)
    store = kind.part("random_store")(config)
    workload: Workload = kind.part("over")(config, store, RandomSamples(kind.make_batch(config, store)))
    return workload


def kind_with_random_data(config: RunConfig) -> Kind:
    """The family; one that does not say what its data look like is refused."""
    kind = KINDS.of(config.workload)
    if kind.over is None or kind.random_store is None or kind.random_batch is None:
        known = [name for name in KINDS if KINDS[name].over is not None]
        raise ConfigError(
            f"halfstep bench cannot make data for {config.workload}",
            why="its Kind has no random_store, random_batch and over",
            fix=f"give it these (examples/own_workload.py), or bench one of {', '.join(known)}",
        )
    return kind


def _preparation(kind: Kind, workload: Workload, device: torch.device) -> Callable[[Batch], Batch]:
    if kind.peer_prepare is not None:
        prepare: Callable[[Batch], Batch] = kind.part("peer_prepare")(device)
        return prepare
    return lambda batch: workload.prepared(batch, key=(), training=True)
