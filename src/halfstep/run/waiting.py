"""How much of the training time passes in waiting for data, and which setting would change that."""

from __future__ import annotations

from dataclasses import dataclass

from halfstep.config.schema import RunConfig
from halfstep.config.section import num_cores as num_cores
from halfstep.config.workloads import is_import_path
from halfstep.data.folder_samples import TrainingFiles
from halfstep.data.loader import Samples
from halfstep.errors import counted, suggested

WORTH_SAYING = 0.1
"""Share of the time below which waiting is nobody's business."""


@dataclass(kw_only=True, slots=True)
class Waiting:
    """Host seconds of training, and those of them blocked in fetching batches."""

    trained_s: float = 0.0
    waited_s: float = 0.0

    def add(self, trained_s: float, waited_s: float) -> None:
        self.trained_s += trained_s
        self.waited_s += waited_s

    @property
    def share(self) -> float:
        return self.waited_s / self.trained_s if self.trained_s else 0.0

    @property
    def is_worth_saying(self) -> bool:
        return self.share > WORTH_SAYING


def way_out(config: RunConfig, samples: Samples, cores: int) -> str:
    """The setting that gets data faster here: more workers while cores are free, then no more decoding."""
    workers = config.data.num_workers
    if workers < cores:
        return f"data.num_workers={cores} (now {workers}, and this machine has {counted(cores, 'core')})"
    if isinstance(samples, TrainingFiles):
        pack = suggested("pack", config.data.dir)
        return f"data.cache=true, or first {pack} (all {counted(cores, 'core')} decode pictures already)"
    smaller = "" if is_import_path(config.workload) else "a smaller data.image_size, or "
    return f"{smaller}more cores (data.num_workers={workers} uses all {cores})"
