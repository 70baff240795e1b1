"""Workload: one training task, with its model, data, loss, metrics, phases, frozen modules and parameter groups."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from halfstep.errors import ConfigError, make_printable
from halfstep.islands import fp32_island
from halfstep_train.data.loader import Key, Samples

Batch = dict[str, Tensor]


class Metrics(Protocol):
    """Interface of metrics: `update` adds to sums on the device, `compute` divides once at the end."""

    def update(self, outputs: Any, batch: Mapping[str, Tensor]) -> None: ...
    def compute(self) -> dict[str, float]: ...
    def state_dict(self) -> dict[str, Tensor]: ...
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None: ...


class Prepare(Protocol):
    """Turn a batch as loaded (uint8) into the model's input: conversion, augmentation and noise.

    Runs in fp32, outside autocast, without gradients. All randomness must come from the key (data.seeds.Key), drawn
    with data.noise."""

    def __call__(self, batch: Batch, *, key: tuple[int, ...], training: bool) -> Batch: ...


def keep_as_loaded(batch: Batch, *, key: tuple[int, ...], training: bool) -> Batch:
    """Return the batch unchanged, for samples that need no preparation."""
    del key, training
    return batch


Forward = Callable[[nn.Module, Batch], Any]
"""Runs the model on a prepared batch."""
Loss = Callable[[Any, Batch], Tensor | tuple[Tensor, Tensor | float]]
"""(outputs, batch) -> the loss, or (loss, weight); the weight is the number of samples, pixels or tokens."""
Sampled = Mapping[str, "np.ndarray[Any, Any] | str"]
"""Images, uint8 (height, width) or (height, width, 3), and texts, by name."""
Sample = Callable[[nn.Module, Key], Sampled]
"""Generates images or texts to look at. All randomness comes from the key, which is the same each time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """One training task, built from a config by a family's `build`."""

    name: str
    model: nn.Module
    train_samples: Samples
    val_samples: Samples
    prepare: Prepare = keep_as_loaded
    forward: Forward
    loss: Loss
    metrics: Callable[[], Metrics]
    """Creates metrics with empty sums."""
    metric: str
    """The main metric: it selects the best checkpoint and controls early stopping and the plateau schedule."""
    mode: Literal["max", "min"] = "max"
    scoring: str = ""
    """How the metrics are computed, if their names do not say it."""
    fragile: tuple[str, ...] = ()
    """Computations that always run in fp32, as `name: reason`; shown as rows of the plan."""
    phases: tuple[Phase, ...] = ()
    """Networks that train in turn, each with its own loss; empty: one phase with `forward`, `loss` and all parameters.
    Validation always uses `forward` and `loss`."""
    store: Mapping[str, Any] = field(default_factory=dict)
    """Facts needed to use the model later: classes, mask values, image format. Stored with checkpoints."""
    notes: tuple[str, ...] = ()
    """Messages shown before training starts, such as the files that were left out."""
    by_batch: tuple[str, ...] = ()
    """Computations over all samples of a batch (such as batch statistics), which each rank does over its own samples
    only; each entry is shown as a warning."""
    about: tuple[tuple[str, str], ...] = ()
    """Names and values, found in the data, for the run's header."""
    settled: Mapping[str, Any] = field(default_factory=dict)
    """Settings by path that follow from the data because the user left them open; a run stores them in its config."""

    frozen: Mapping[str, Any] = field(default_factory=dict)
    """Modules that are used but not trained, by name: nn.Module (wrapped as FrozenPart) or FrozenPart. They are not
    part of `model`; forward, loss and prepare refer to them. The plan moves and casts them in place."""
    groups: tuple[Group, ...] = ()
    """Parameters with a separate learning rate or schedule."""
    values: Mapping[str, Scheduled] = field(default_factory=dict)
    """Numbers that change with the steps and are read in forward or loss."""
    sample: Sample | None = None
    """Called every `train.sample_every` steps in evaluation mode with the averaged weights; the results are written to
    report/samples."""
    scores_raw: bool = False
    """Whether validation also scores the weights as trained (`raw_NAME`) when averaged weights are used."""
    blocks: Mapping[type[nn.Module], Callable[..., Any] | None] = field(default_factory=dict)
    """Classes of repeated blocks, each with the forward to use in captured steps, or None to compile the block. Nothing
    else is compiled then. Empty: forward and loss are compiled as a whole."""
    ema_parts: tuple[str, ...] = ()
    """Names of modules or parameters that EMA averages; empty: all."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "frozen", wrap_frozen_parts(self.frozen))
        check_frozen_apart(self.model, self.frozen)
        # Values may come from files and contain control characters.
        object.__setattr__(self, "about", tuple((name, make_printable(value)) for name, value in self.about))

    def list_modules(self) -> tuple[nn.Module, ...]:
        return (self.model, *(part.module for part in self.frozen.values()))

    def prepare_batch(self, batch: Batch, *, key: tuple[int, ...], training: bool) -> Batch:
        """Run `prepare` in fp32, outside autocast, without gradients."""
        with torch.no_grad(), fp32_island():
            return self.prepare(batch, key=key, training=training)

    def compute_loss(self, outputs: Any, batch: Batch) -> tuple[Tensor, Tensor | float]:
        """Return the loss and its weight; if `loss` returns no weight, the number of samples."""
        found = self.loss(outputs, batch)
        return found if isinstance(found, tuple) else (found, len(next(iter(batch.values()))))

    def make_region(self, model: nn.Module, *, name: str = "") -> Callable[[Batch], tuple[Tensor, Tensor | float, Any]]:
        """Return a function that runs forward and loss of one batch: the region that is compiled.

        A `name` gives it a separate code object, because Dynamo limits recompilations per code object."""

        def forward_and_loss(batch: Batch) -> tuple[Tensor, Tensor | float, Any]:
            outputs = self.forward(model, batch)
            loss, weight = self.compute_loss(outputs, batch)
            return loss, weight, outputs

        if name:
            forward_and_loss.__code__ = forward_and_loss.__code__.replace(co_name=f"{name}_and_loss")
        return forward_and_loss


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenedData:
    """A data folder as training reads it: samples, and what a workload and `halfstep guide` say about them."""

    train: Any
    val: Any
    """Samples, of a class of the family."""
    store: Mapping[str, Any] = field(default_factory=dict)
    """Facts about the data that the model depends on, as a run stores them."""
    notes: tuple[str, ...] = ()
    about: tuple[tuple[str, str], ...] = ()
    settled: Mapping[str, Any] = field(default_factory=dict)
    """The store and these three are the fields of Workload with the same names."""
    classes: tuple[str, ...] = ()
    """Names of the classes, for the guide."""
    counts: tuple[int, ...] = ()
    """Training samples of each class; empty if one sample holds several classes."""
    sides: tuple[int, int] | None = None
    """Median width and height of a few images, in pixels."""
    remarks: tuple[tuple[str, str], ...] = ()
    """What a suggestion of the guide should point out, such as a file that training needs."""

    def to_fields(self) -> dict[str, Any]:
        """Return the fields of a Workload on these samples."""
        told = {name: getattr(self, name) for name in ("store", "notes", "about", "settled")}
        return {"train_samples": self.train, "val_samples": self.val, **told}


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    """One optimizer step over some of the parameters, such as those of one network of a GAN. An iteration runs its
    phases in order, each with its own forward pass, loss, schedule and verdict."""

    name: str
    parameters: tuple[str, ...] = ()
    """Names of the modules or parameters it trains; `generator` includes everything below it; empty: all. Nothing else
    gets gradients while the phase runs."""
    loss: Loss
    forward: Forward | None = None
    """None: the workload's forward. All calls of the model belong here; `loss` gets only the outputs."""
    counted: bool | None = None
    """Whether training metrics use its outputs; None: only if `forward` is None. Metrics use the first such phase, so
    that each sample counts once."""
    every: int = 1
    """Due in iterations `from_step`, `from_step + every`, ..."""
    from_step: int = 0
    optimizer: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the config's `optimizer` that differ."""
    schedule: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the config's `schedule` that differ; it follows the steps of this phase."""
    groups: tuple[Group, ...] = ()
    """Parameters with their own learning rate or schedule."""
    compiles: bool = True
    """False for a loss that computes gradients itself, such as a gradient penalty: it cannot be compiled."""

    def __post_init__(self) -> None:
        refuse_bad_name(self.name, "a phase")
        if self.every < 1 or self.from_step < 0:
            raise ConfigError(
                f"phase {self.name} cannot run every {self.every} iterations from {self.from_step} on",
                fix="set every to at least 1 and from_step to at least 0",
            )

    def is_due(self, iteration: int) -> bool:
        return iteration >= self.from_step and (iteration - self.from_step) % self.every == 0

    @property
    def when(self) -> str:
        """Describe when the phase runs, for headers: `critic every 2 steps from 1000`."""
        every = f" every {self.every} steps" if self.every > 1 else ""
        return f"{self.name}{every}" + (f" from {'' if every else 'step '}{self.from_step}" if self.from_step else "")

    def count_due(self, iterations: int) -> int:
        """Count the iterations, among the first `iterations`, in which the phase runs."""
        # Ceiling division: due in from_step, from_step + every, ...
        return max(0, -(-(iterations - self.from_step) // self.every))


@dataclass(frozen=True, kw_only=True, slots=True)
class FrozenPart:
    """A module that is used but not trained, and the file it was loaded from, if any."""

    module: nn.Module
    source: str = ""
    checksum: str = ""
    """Checksum of the initial weights; computed by a run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Parameters with separate optimizer settings; None keeps the config's."""

    modules: tuple[str, ...]
    """Names of modules or parameters of the model; `encoder` includes everything below it. If several groups match, the
    first is used."""
    lr: float | None = None
    """Peak learning rate; not scaled with the batch size."""
    schedule: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the config's `schedule` that differ."""
    weight_decay: float | None = None


def refuse_bad_name(name: str, whose: str) -> None:
    """Refuse a name that cannot be part of a setting."""
    if not name.isidentifier():
        raise ConfigError(
            f"{name!r} is not a valid name for {whose}",
            why="settings and files of the run folder use the name",
            fix="use letters, digits and _",
        )


def wrap_frozen_parts(given: Mapping[str, Any]) -> dict[str, FrozenPart]:
    """Wrap bare modules as FrozenPart."""
    for name, part in given.items():
        refuse_bad_name(name, "a frozen part")
        if not isinstance(part, nn.Module | FrozenPart):
            what = f"the frozen part {name!r} is a {type(part).__name__}"
            raise ConfigError(what, fix="give an nn.Module or FrozenPart")
    return {name: part if isinstance(part, FrozenPart) else FrozenPart(module=part) for name, part in given.items()}


def check_frozen_apart(model: nn.Module, frozen: Mapping[str, FrozenPart]) -> None:
    """Refuse a frozen module that is also part of the model, by name or by weights."""
    trained = {id(parameter) for parameter in model.parameters()}
    for name, part in frozen.items():
        has_weights = any(id(parameter) in trained for parameter in part.module.parameters())
        if has_weights or name in dict(model.named_children()):
            held = "weights of" if has_weights else "a module with the name of"
            raise ConfigError(
                f"{type(model).__name__} contains {held} the frozen part {name!r}",
                why="a frozen part is neither trained nor stored, and precision.modules must tell it from the model",
                fix="give it another name, and let the workload's forward refer to it instead of making it a submodule",
            )


class Scheduled:
    """A value per step: `tau = Scheduled(lambda step: max(0.1, 1 - step / 30_000))`, read as `tau.value` in forward or
    loss.

    Compiled code and captured CUDA graphs would silently freeze a Python number. The value is therefore a tensor on the
    run's device, refreshed at the start of each step from a table indexed by committed steps, like the learning rate.
    """

    def __init__(self, at: Callable[[int], float]) -> None:
        self.at = at
        self.value: Tensor = torch.tensor(self(0), dtype=torch.float32)
        """The current step's value, 0-dim fp32; on the CPU until a run moves it."""

    def __call__(self, step: int) -> float:
        found: Any = self.at(step)
        if isinstance(found, complex) or not math.isfinite(found):
            raise ConfigError(
                f"a scheduled value is {found} at step {step}",
                why="values are computed ahead of time, so each step needs a finite number",
                fix="clamp its argument, as in max(0, 1 - step / total)",
            )
        return float(found)
