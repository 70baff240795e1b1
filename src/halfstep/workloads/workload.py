"""What a workload is: a model, its data, its loss, its metrics, and what is fragile about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from torch import Tensor, nn

from halfstep.data.loader import Samples
from halfstep.errors import printable
from halfstep.workloads.phase import Phase

Batch = dict[str, Tensor]


class Metrics(Protocol):
    """Counts on the device over many batches; divided once, in `compute`."""

    def update(self, outputs: Any, batch: Mapping[str, Tensor]) -> None: ...
    def compute(self) -> dict[str, float]: ...
    def state_dict(self) -> dict[str, Tensor]: ...
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None: ...


class Prepare(Protocol):
    """From a batch as loaded (uint8) to what the model sees; augments when training, by the key alone."""

    def __call__(self, batch: Batch, *, key: tuple[int, ...], training: bool) -> Batch: ...


class Forward(Protocol):
    def __call__(self, model: nn.Module, batch: Batch) -> Any: ...


class Loss(Protocol):
    """Loss and weight of a batch: the weight is its number of samples (or pixels, or tokens)."""

    def __call__(self, outputs: Any, batch: Batch) -> tuple[Tensor, Tensor | float]: ...


class MakeMetrics(Protocol):
    def __call__(self) -> Metrics: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """One thing to train. Built by `workloads/<name>.py` from a config."""

    name: str
    model: nn.Module
    train_samples: Samples
    val_samples: Samples
    prepare: Prepare
    forward: Forward
    loss: Loss
    metrics: MakeMetrics
    metric: str
    """The headline metric: picks the best checkpoint, stops early, drives plateau."""
    mode: Literal["max", "min"] = "max"
    scoring: str = ""
    """How the metrics are computed, where their names alone do not say it."""
    fragile: tuple[str, ...] = ()
    """Islands, as `name: reason`; rows of the plan."""
    phases: tuple[Phase, ...] = ()
    """Networks that train in turn, each with a loss of its own; empty: one, `forward` and `loss` over all parameters.
    Validation uses `forward` and `loss` in any case."""
    store: Mapping[str, Any] = field(default_factory=dict)
    """What a checkpoint must know to use the model later: classes, mask values, image format."""
    notes: tuple[str, ...] = ()
    """What the user should read before training starts, such as the files that were left out."""
    val_names: tuple[str, ...] = ()
    """Files of the validation samples, for reports; empty where the samples are no files."""
    about: tuple[tuple[str, str], ...] = ()
    """What the data decided, as names and values for the run's header."""
    settled: Mapping[str, Any] = field(default_factory=dict)
    """Settings by path that the data decided where the user had not; a run stores them with its config."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "val_names", tuple(printable(name) for name in self.val_names))
        object.__setattr__(self, "about", tuple((name, printable(value)) for name, value in self.about))

    def weighed_loss(self, outputs: Any, batch: Batch) -> tuple[Tensor, Tensor | float]:
        """Loss and weight; a loss that comes alone counts by the number of samples."""
        found: Any = self.loss(outputs, batch)
        return found if isinstance(found, tuple) else (found, len(next(iter(batch.values()))))
