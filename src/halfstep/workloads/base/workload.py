"""What a workload is: a model, its data, its loss, its metrics, and what is fragile about it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from halfstep.data.loader import Samples
from halfstep.data.seeds import Key
from halfstep.errors import ConfigError, make_printable
from halfstep.islands import fp32_island
from halfstep.workloads.base.scheduled import Scheduled

Batch = dict[str, Tensor]


class Metrics(Protocol):
    """Counts on the device over many batches; divided once, in `compute`."""

    def update(self, outputs: Any, batch: Mapping[str, Tensor]) -> None: ...
    def compute(self) -> dict[str, float]: ...
    def state_dict(self) -> dict[str, Tensor]: ...
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None: ...


class Prepare(Protocol):
    """From a batch as loaded (uint8) to what the model sees: bytes, augmentation and noise, by the key alone.

    It runs in fp32, outside autocast, without gradients. The key is data.seeds.Key; draw from it with data.noise."""

    def __call__(self, batch: Batch, *, key: tuple[int, ...], training: bool) -> Batch: ...


def keep_as_loaded(batch: Batch, *, key: tuple[int, ...], training: bool) -> Batch:
    """Samples that are what the model sees need no preparation."""
    del key, training
    return batch


class Forward(Protocol):
    def __call__(self, model: nn.Module, batch: Batch) -> Any: ...


class Loss(Protocol):
    """Loss, or loss and weight of a batch: the weight is its number of samples (or pixels, or tokens)."""

    def __call__(self, outputs: Any, batch: Batch) -> Tensor | tuple[Tensor, Tensor | float]: ...


Sampled = Mapping[str, "np.ndarray[Any, Any] | str"]
"""Pictures (height, width) or (height, width, 3) of uint8, and texts, by name."""


class Sample(Protocol):
    """What the model makes by itself, for people to look at; every draw by the key, which is the same each time."""

    def __call__(self, model: nn.Module, key: Key) -> Sampled: ...


class MakeMetrics(Protocol):
    def __call__(self) -> Metrics: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """One thing to train. Built by `workloads/<name>.py` from a config."""

    name: str
    model: nn.Module
    train_samples: Samples
    val_samples: Samples
    prepare: Prepare = keep_as_loaded
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
    by_batch: tuple[str, ...] = ()
    """What is computed over the samples of a batch together, so that several processes compute it over their own parts:
    each is told so."""
    val_names: tuple[str, ...] = ()
    """Files of the validation samples, for reports; empty where the samples are not files."""
    about: tuple[tuple[str, str], ...] = ()
    """What the data decided, as names and values for the run's header."""
    settled: Mapping[str, Any] = field(default_factory=dict)
    """Settings by path that the data decided where the user had not; a run stores them with its config."""

    frozen: Mapping[str, Any] = field(default_factory=dict)
    """Parts that are used and not trained, by name: modules or FrozenParts; afterwards FrozenParts. `model` does not
    hold them: forward, loss and prepare do. They are placed and cast in place, by the plan."""
    groups: tuple[Group, ...] = ()
    """Parameters with a learning rate or schedule of their own."""
    values: Mapping[str, Scheduled] = field(default_factory=dict)
    """What changes with the steps and is read in forward or loss."""
    sample: Sample | None = None
    """Called every `train.sample_every` steps in evaluation mode with the averaged weights; written to
    report/samples."""
    scores_raw: bool = False
    """Where weights are averaged: whether validation scores them as trained, too, as `raw_NAME`."""
    blocks: Mapping[type[nn.Module], Callable[..., Any] | None] = field(default_factory=dict)
    """Kinds of blocks that a deep network repeats, each with its forward in captured steps, which then are compiled in
    no other part; None: such a block is compiled alone. Empty: forward and loss are compiled as a whole."""
    ema_parts: tuple[str, ...] = ()
    """Names of modules or parameters that are averaged; empty: all."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "frozen", wrap_frozen_parts(self.frozen))
        check_frozen_apart(self.model, self.frozen)
        object.__setattr__(self, "val_names", tuple(make_printable(name) for name in self.val_names))
        object.__setattr__(self, "about", tuple((name, make_printable(value)) for name, value in self.about))

    def modules(self) -> tuple[nn.Module, ...]:
        return (self.model, *(part.module for part in self.frozen.values()))

    def prepared(self, batch: Batch, *, key: tuple[int, ...], training: bool) -> Batch:
        """`prepare` as it runs everywhere: in fp32, outside autocast, without gradients."""
        with torch.no_grad(), fp32_island():
            return self.prepare(batch, key=key, training=training)

    def weighed_loss(self, outputs: Any, batch: Batch) -> tuple[Tensor, Tensor | float]:
        """Loss and weight; a loss that comes alone counts by the number of samples."""
        found = self.loss(outputs, batch)
        return found if isinstance(found, tuple) else (found, len(next(iter(batch.values()))))

    def region(self, model: nn.Module, *, name: str = "") -> Callable[[Batch], tuple[Tensor, Tensor | float, Any]]:
        """Return forward and loss of one batch as one function, which is what gets compiled. Under a name it is code of
        its own to the compiler, which counts how often it has compiled each."""

        def forward_and_loss(batch: Batch) -> tuple[Tensor, Tensor | float, Any]:
            outputs = self.forward(model, batch)
            loss, weight = self.weighed_loss(outputs, batch)
            return loss, weight, outputs

        if name:
            forward_and_loss.__code__ = forward_and_loss.__code__.replace(co_name=f"{name}_and_loss")
        return forward_and_loss


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    """One optimizer step of an iteration. Phases run in the order they are given, each with its own forward pass."""

    name: str
    parameters: tuple[str, ...] = ()
    """What it trains: names of modules or parameters of the model, `generator` names all below it; empty: all.
    Nothing else gets gradients while it runs."""
    loss: Loss
    forward: Forward | None = None
    """None: the workload's own. All that needs the model belongs here; `loss` gets the outputs."""
    counted: bool | None = None
    """Whether training metrics may take its outputs; None: where `forward` is the workload's own. The first such phase
    is counted, so that a sample counts once."""
    every: int = 1
    """Due in iterations `from_step`, `from_step + every`, ..."""
    from_step: int = 0
    optimizer: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the config's `optimizer` that differ."""
    schedule: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the config's `schedule` that differ; it follows the steps of this phase."""
    groups: tuple[Group, ...] = ()
    """Parameters with a learning rate or schedule of their own."""
    compiles: bool = True
    """False for a loss that takes gradients itself, such as a gradient penalty: the compiler cannot."""

    def __post_init__(self) -> None:
        if not self.name.isidentifier():
            raise ConfigError(
                f"{self.name!r} is not a name for a phase",
                why="reports and checkpoints name it",
                fix="letters, digits, _",
            )
        if self.every < 1 or self.from_step < 0:
            raise ConfigError(
                f"phase {self.name} cannot run every {self.every} iterations from {self.from_step} on",
                fix="every is at least 1, from_step at least 0",
            )

    def is_due(self, iteration: int) -> bool:
        return iteration >= self.from_step and (iteration - self.from_step) % self.every == 0

    @property
    def when(self) -> str:
        """`critic every 2 steps from 1000`, for headers."""
        every = f" every {self.every} steps" if self.every > 1 else ""
        return f"{self.name}{every}" + (f" from {'' if every else 'step '}{self.from_step}" if self.from_step else "")

    def num_due(self, iterations: int) -> int:
        """Of so many iterations, those in which it runs."""
        return max(0, -(-(iterations - self.from_step) // self.every))


@dataclass(frozen=True, kw_only=True, slots=True)
class FrozenPart:
    """A module that is used and not trained, and the file it came from; empty where it was made here."""

    module: nn.Module
    source: str = ""
    checksum: str = ""
    """Filled in by a run: of the weights as they were built."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Parameters with settings of their own; None leaves what the config says."""

    modules: tuple[str, ...]
    """Names of modules or parameters of the model; `encoder` names all below it. The first group that fits counts."""
    lr: float | None = None
    """The peak of its schedule, as it is: not scaled with the batch."""
    schedule: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the config's `schedule` that differ."""
    weight_decay: float | None = None


def wrap_frozen_parts(given: Mapping[str, Any]) -> dict[str, FrozenPart]:
    """Modules or FrozenParts as FrozenParts."""
    return {name: _wrap_frozen_part(name, part) for name, part in given.items()}


def _wrap_frozen_part(name: str, part: Any) -> FrozenPart:
    if not name.isidentifier():
        raise ConfigError(
            f"{name!r} is not a name for a frozen part",
            why="precision.modules and the run's folder name it",
            fix="letters, digits and _",
        )
    if not isinstance(part, nn.Module | FrozenPart):
        raise ConfigError(f"the frozen part {name!r} is a {type(part).__name__}", fix="give an nn.Module or FrozenPart")
    return part if isinstance(part, FrozenPart) else FrozenPart(module=part)


def check_frozen_apart(model: nn.Module, frozen: Mapping[str, FrozenPart]) -> None:
    """A frozen part that is part of the model too, by its name or by its weights."""
    trained = {id(parameter) for parameter in model.parameters()}
    for name, part in frozen.items():
        if name in dict(model.named_children()):
            raise ConfigError(
                f"{name!r} names a frozen part and a module of {type(model).__name__}",
                why="precision.modules could mean either",
                fix="give one of them another name",
            )
        if any(id(parameter) in trained for parameter in part.module.parameters()):
            raise ConfigError(
                f"{type(model).__name__} holds weights of the frozen part {name!r}",
                why="they would be trained, averaged and stored with it",
                fix="keep the part out of the model: let forward hold it",
            )
