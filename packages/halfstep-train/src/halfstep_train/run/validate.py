"""Validate, write samples, and decide when to stop early."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from halfstep.disk import open_atomic_folder
from halfstep.distributed.world import World
from halfstep.errors import CheckpointError, ConfigError
from halfstep.precision.plan import Plan
from halfstep.prefetching import prefetch
from halfstep.step.phases import PhasedStep
from halfstep.step.randomness import read_generators, restore_generators
from halfstep.step.step import GuardedStep
from halfstep_train.data.loader import Key, Loader
from halfstep_train.run.memory.out_of_memory import count_parts, split_window
from halfstep_train.tune.channels_last import match_layout
from halfstep_train.workloads.base.workload import Batch, Workload

if TYPE_CHECKING:
    from halfstep_train.run.assemble import Assembly  # which holds this file's EarlyStopping


@contextmanager
def enter_evaluation(model: nn.Module) -> Iterator[None]:
    """Switch to evaluation mode without gradients; every module's own mode is restored afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode


def use_average(step: GuardedStep | PhasedStep) -> AbstractContextManager[None]:
    """Put the averaged weights into the model, if the step keeps an average."""
    return step.ema.swap_in() if step.ema is not None else nullcontext()


def validate(
    workload: Workload,
    model: nn.Module,
    plan: Plan,
    loader: Loader,
    *,
    pieces: int = 1,
    world: World | None = None,
    call: Callable[..., Any] | None = None,
    advance: Callable[[], None] = lambda: None,
) -> dict[str, float]:
    """Return loss and metrics over the whole set. Sums are divided once, at the end, so batch sizes do not matter.

    `call` runs the forward pass of a sharded model, in which every rank takes part.
    """

    def run_forward(part: Batch) -> tuple[Any, Tensor, Tensor | float]:
        outputs = workload.forward(model, part)
        return outputs, *workload.compute_loss(outputs, part)

    device = torch.device(plan.device)
    metrics = workload.metrics()
    loss_sum = torch.zeros((), dtype=torch.float64, device=device)
    weight_sum = torch.zeros((), dtype=torch.float64, device=device)
    index = 0
    with enter_evaluation(model):
        for batch, size in zip(
            prefetch(loader.iterate_epoch(0), device), loader.list_sizes(0, len(loader)), strict=True
        ):
            place = 0 if world is None else world.find_first_row(size)
            key = Key.for_validation(index + place)
            index += size
            advance()
            is_idle = world is not None and world.count_rows(size) == 0
            if is_idle and call is None:
                continue
            prepared = match_layout(model, workload.prepare_batch(batch, key=key, training=False))
            with plan.forward():
                own = split_window([prepared], pieces)
                num = len(own)
                if call is not None and world is not None:  # all ranks run equally many forward passes
                    num = max(count_parts(world.count_rows(size, rank), pieces) for rank in range(world.size))
                for k in range(num):
                    part = own[min(k, len(own) - 1)]
                    outputs, loss, weight = run_forward(part) if call is None else call(run_forward, part)
                    if is_idle or k >= len(own):
                        continue
                    # In fp64 on the device: the sum over a large set must not round, and the host does not wait.
                    loss_sum += loss.double() * weight
                    weight_sum += weight
                    metrics.update(outputs, part)
    if world is not None:
        sums = world.sum_over_ranks({"loss": loss_sum, "weight": weight_sum}, device)
        loss_sum, weight_sum = sums["loss"], sums["weight"]
        metrics.load_state_dict(world.sum_over_ranks(metrics.state_dict(), device))
    return {"loss": float(loss_sum / weight_sum), **metrics.compute()}


# --- samples ---

FORM = "a str, or a uint8 array of shape (height, width) or (height, width, 3)"


def sample(parts: Assembly, folder: Path) -> list[Path]:
    """Call the workload's `sample` with the weights that validation uses, and restore all generators."""
    assert parts.workload.sample is not None
    generators = read_generators()
    parts.values.refresh()
    try:
        with use_average(parts.step), enter_evaluation(parts.model), parts.plan.forward():
            found = parts.call(parts.workload.sample, parts.model, Key.for_sampling(parts.train.seed))
    finally:
        restore_generators(generators)
    # All ranks of a sharded model compute the samples, and rank 0 writes them.
    return write_samples(folder, found) if parts.world is None or parts.world.is_first else []


def write_samples(folder: Path, found: Mapping[str, Any]) -> list[Path]:
    """Write `NAME.png` and `NAME.txt`; samples of the same step from before a resume are replaced."""
    for name, value in found.items():
        _refuse_unfit_sample(name, value)
    try:
        with open_atomic_folder(folder, replaces=True) as hidden:
            written = [_write(hidden / name, value) for name, value in found.items()]
    except OSError as error:
        raise CheckpointError(f"cannot write samples into {folder}: {error.strerror}", fix="free disk space") from error
    return [folder / path.name for path in written]


def _write(path: Path, value: Any) -> Path:
    if isinstance(value, str):
        path = path.with_name(f"{path.name}.txt")
        path.write_text(value, encoding="utf-8")
    else:
        path = path.with_name(f"{path.name}.png")
        Image.fromarray(value).save(path)
    return path


def _refuse_unfit_sample(name: str, value: Any) -> None:
    is_picture = isinstance(value, np.ndarray) and value.dtype == np.uint8 and value.size > 0
    if isinstance(value, str) or is_picture and (value.ndim == 2 or value.ndim == 3 and value.shape[2] == 3):
        return
    shape = f" of {value.dtype}, shape {tuple(value.shape)}" if hasattr(value, "dtype") else ""
    raise ConfigError(f"sample() returned {name!r} as a {type(value).__name__}{shape}", fix=f"return {FORM}")


# --- the best validation ---


class EarlyStopping:
    """Track the best value of the headline metric and count validations since. NaN is never the best.

    A validation out of turn (a run that ends in mid-epoch) may be the best one, but patience ignores it, because a
    longer run would not have had it.
    """

    def __init__(self, *, mode: Literal["max", "min"], patience: int) -> None:
        self.mode, self.patience = mode, patience
        self.best, self.best_epoch = math.nan, 0
        self.best_in_turn, self.num_since = math.nan, 0

    def observe(self, value: float, epoch: int, *, in_turn: bool = True) -> bool:
        """Record a validation and return whether it is the best so far."""
        if in_turn:
            is_news = self._is_better(value, self.best_in_turn)
            self.best_in_turn = value if is_news else self.best_in_turn
            self.num_since = 0 if is_news else self.num_since + 1
        if not self._is_better(value, self.best):
            return False
        self.best, self.best_epoch = value, epoch
        return True

    def _is_better(self, value: float, than: float) -> bool:
        if math.isnan(value) or math.isnan(than):
            return not math.isnan(value)
        return value > than if self.mode == "max" else value < than

    @property
    def should_stop(self) -> bool:
        return 0 < self.patience <= self.num_since

    def state_dict(self) -> dict[str, Any]:
        best, in_turn = (None if math.isnan(value) else value for value in (self.best, self.best_in_turn))
        return {"best": best, "best_epoch": self.best_epoch, "best_in_turn": in_turn, "num_since": self.num_since}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.best = math.nan if state["best"] is None else float(state["best"])
        self.best_in_turn = math.nan if state["best_in_turn"] is None else float(state["best_in_turn"])
        self.best_epoch, self.num_since = int(state["best_epoch"]), int(state["num_since"])
