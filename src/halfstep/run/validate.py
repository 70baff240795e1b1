"""One pass over a data set without learning from it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import nn

from halfstep.data.loader import Loader
from halfstep.data.prefetch import prefetch
from halfstep.data.seeds import Key
from halfstep.precision.plan import Plan
from halfstep.step.phases import PhasedStep
from halfstep.step.step import Step
from halfstep.step.world import World
from halfstep.tune.layout import in_layout_of
from halfstep.tune.memory_limit import split_window
from halfstep.workloads.workload import Workload


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode and no gradients inside; every module's own mode comes back afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextmanager
def averaged(step: Step | PhasedStep) -> Iterator[None]:
    """The model holds its averaged weights inside, where the step keeps an average."""
    with step.ema.swapped_in() if step.ema is not None else nullcontext():
        yield


def validate(
    workload: Workload,
    model: nn.Module,
    plan: Plan,
    loader: Loader,
    *,
    pieces: int = 1,
    world: World | None = None,
    advance: Callable[[], None] = lambda: None,
) -> dict[str, float]:
    """Loss and metrics, exact over the whole set: sums are divided once, at the end."""
    device = torch.device(plan.device)
    metrics = workload.metrics()
    loss_sum = torch.zeros((), dtype=torch.float64, device=device)
    weight_sum = torch.zeros((), dtype=torch.float64, device=device)
    index = 0
    with evaluating(model):
        for batch, size in zip(prefetch(loader.epoch(0), device), loader.sizes(0, len(loader)), strict=True):
            place = 0 if world is None else world.place(size)
            key = Key.of_validation(loader.seed, index + place)
            index += size
            advance()
            if world is not None and world.rows(size) == 0:
                continue
            prepared = in_layout_of(model, workload.prepared(batch, key=key, training=False))
            with plan.forward():
                for part in split_window([prepared], pieces):
                    outputs = workload.forward(model, part)
                    loss, weight = workload.weighed_loss(outputs, part)
                    loss_sum += loss.double() * weight
                    weight_sum += weight
                    metrics.update(outputs, part)
    if world is not None:
        sums = world.summed({"loss": loss_sum, "weight": weight_sum}, device)
        loss_sum, weight_sum = sums["loss"], sums["weight"]
        metrics.load_state_dict(world.summed(metrics.state_dict(), device))
    return {"loss": float(loss_sum / weight_sum), **metrics.compute()}
