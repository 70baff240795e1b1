"""The batch a run begins with, for trials: a sample depends on seed, epoch and index, so reading it changes nothing."""

from __future__ import annotations

from halfstep.config.schema import RunConfig
from halfstep.data.loader import Loader
from halfstep.workloads.workload import Batch, Workload


def first_batch(config: RunConfig, workload: Workload) -> Batch:
    """As it is loaded, on the host."""
    train = config.train
    loader = Loader(workload.train_samples, batch_size=train.batch_size, seed=train.seed, shuffle=True)
    try:
        return next(loader.epoch(0))
    finally:
        loader.close()
