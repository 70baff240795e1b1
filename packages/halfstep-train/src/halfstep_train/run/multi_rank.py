"""Connect the assembly of one rank with those of the others, and refuse what they cannot train together."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from functools import partial
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor, nn

from halfstep import __version__
from halfstep.distributed.world import World, mark_agreed
from halfstep.errors import ConfigError, HalfstepError
from halfstep.step.facts import PhasedReading, Reading
from halfstep.step.phases import freeze_others
from halfstep.step.randomness import seed_everything
from halfstep.step.ranks import Ranks, refuse_differing_settings, wrap_regions
from halfstep_train.config.load import Loaded
from halfstep_train.config.schema import RunConfig, TrainConfig
from halfstep_train.run.folder import digest_contents
from halfstep_train.run.frozen_modules import compute_checksum
from halfstep_train.run.memory.out_of_memory import OutOfMemory
from halfstep_train.run.resume import flatten_settings
from halfstep_train.tune.modes import Batch, Region
from halfstep_train.workloads.base.workload import Workload

OWN = ("device", "log.", "data.num_workers")  # settings that may differ between ranks


def connect_ranks(
    world: World | None,
    train: TrainConfig,
    model: nn.Module,
    regions: tuple[Region, Region],
    device: torch.device,
    trained: list[nn.Parameter] | None = None,
) -> tuple[Region, Region, Ranks | Literal["alone"]]:
    """Wrap the eager and the compiled region in DDP, and return them with the step's `Ranks`; unchanged on one rank.

    `trained` are the parameters of a phase: the others get no gradients, and DDP must not wait for them.
    """
    eager, compiled = regions
    if world is None:
        return eager, compiled, "alone"

    def run_compiled_or_eager(batch: Batch) -> tuple[Tensor, Tensor | float, Any]:
        """Fall back to eager within the step: the other ranks are in the same step, and the sums stay the same."""
        try:
            # By default dynamo splits a region inside DDP at its buckets, to overlap sums with backward. That fuses
            # less, and it fails on kernels that are custom autograd functions, as ours are.
            with torch._dynamo.config.patch(optimize_ddp=False):
                return compiled(batch)
        except (HalfstepError, OutOfMemory):
            raise
        except Exception as error:
            found = eager(batch)  # an error that eager raises too is not the compiler's
            ranks.uncompiled = error
            ranks.announce_mode("eager")
            return found

    own = [p for p in model.parameters() if p.requires_grad] if trained is None else trained
    # DDP looks at requires_grad when it wraps: it must not wait for gradients of other phases.
    with freeze_others(model, own):
        wrapped = wrap_regions(
            model,
            {"eager": eager, "compiled": run_compiled_or_eager},
            device,
            reduce=train.reduce,
            find_unused=train.find_unused,
        )
    ranks = Ranks(world, [wrapped], device)
    return partial(wrapped, "eager"), partial(wrapped, "compiled"), ranks


def synchronise_norms(model: nn.Module, device: torch.device) -> nn.Module:
    """Replace BatchNorm by SyncBatchNorm, as `train.sync_batch_norm` asks."""
    if device.type != "cuda":
        refuse_on_all(
            f"train.sync_batch_norm=true does not work on {device.type}",
            why="torch supports SyncBatchNorm on GPUs only",
            fix="leave it out, or train on GPUs",
        )
    return nn.SyncBatchNorm.convert_sync_batchnorm(model)


def refuse_on_all(what: str, *, why: str, fix: str) -> NoReturn:
    """Raise ConfigError for what every rank refuses, so that it is shown without the number of one rank."""
    raise mark_agreed(ConfigError(what, why=why, fix=fix))


def refuse_small_batch(loaded: Loaded, size: int) -> None:
    """Refuse a batch that several ranks cannot divide, or that counts other ranks, before anything is built."""
    batch_size = loaded.config.train.batch_size
    if loaded.per_rank and loaded.num_ranks != size:
        refuse_on_all(
            f"{loaded.per_rank[0]} is given per GPU and was multiplied by {loaded.num_ranks}, not by {size} ranks",
            why="the config was loaded before the ranks were known",
            fix=f"name the workload or file in hs.train itself, or give {loaded.per_rank[0]} for all ranks",
        )
    if size > batch_size:
        refuse_on_all(
            f"train.batch_size={batch_size} is too small for {size} ranks",
            why="batch_size counts samples over all ranks, and each rank needs at least one",
            fix=f"train.batch_size={size} or more, or fewer ranks",
        )


def refuse_differences(config: RunConfig, workload: Workload, world: World, *, resumes: bool = False) -> None:
    """Refuse to start on all ranks if they would train different things."""
    settings = {key: repr(value) for key, value in flatten_settings(config).items() if not key.startswith(OWN)}
    own = {
        "halfstep": __version__,
        "torch": torch.__version__,
        **settings,
        "the number of training samples": str(len(workload.train_samples)),
        "the number of validation samples": str(len(workload.val_samples)),
        "the names and sizes of the data files": digest_contents(workload),
    }
    if not resumes:  # weights are uninitialised until the checkpoint is loaded
        own["the first weights"] = compute_checksum(workload.model)[:12]
    refuse_differing_settings(
        world,
        own,
        why="all ranks of a run train the same model on the same data",
        fix="give every rank the same command, data and versions",
    )


def gather_samples(world: World, reading: Reading) -> Reading:
    """Add the samples of the faulty ranks to a bad step's reading; all ranks call it at the same step."""
    if not reading.is_bad:
        return reading
    ids = world.gather(reading.sample_ids)
    # A stored reading may come from more ranks than there are now.
    faulty = [rank for rank in reading.faulty_ranks if rank < world.size] or range(world.size)
    found = tuple(dict.fromkeys(number for rank in faulty for number in ids[rank]))
    if not isinstance(reading, PhasedReading):
        return dataclasses.replace(reading, sample_ids=found)
    parts: Mapping[str, Any] = {name: dataclasses.replace(p, sample_ids=found) for name, p in reading.phases.items()}
    return dataclasses.replace(reading, sample_ids=found, phases=parts)


def seed_rank(seed: int, attempted: int, rank: int) -> None:
    """Seed a rank without stored generators; the seed differs by rank and after each resume."""
    mixed = hashlib.sha256(f"{seed},{attempted},{rank}".encode()).digest()
    seed_everything(int.from_bytes(mixed[:7], "little"))
