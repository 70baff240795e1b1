"""Captured steps under torch's profiler: a replay that the run makes anyway, and its code uncaptured, on the side."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

from halfstep.evidence.captured import COMPUTING, Modules, Placed, placed
from halfstep.evidence.compiled_sites import CompiledCode, NodeRecorder
from halfstep.evidence.graphs import names_in
from halfstep.evidence.owners import owners_of_nodes
from halfstep.evidence.side import seen_by, undone
from halfstep.evidence.trace import Event
from halfstep.kernels.fast_forms import chains
from halfstep.run.engine import Engine
from halfstep.run.frozen import modules_of
from halfstep.step.step import LossFn
from halfstep.tune.modes import Batch


class Recording:
    """What runs within; the host waits for the device before and after."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.profiler = profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], record_shapes=True)

    def __enter__(self) -> Self:
        torch.cuda.synchronize(self.device)
        self.profiler.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        torch.cuda.synchronize(self.device)
        self.profiler.__exit__(*error)

    def events(self) -> list[Event]:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "trace.json"
            self.profiler.export_chrome_trace(str(file))
            events: list[Event] = json.loads(file.read_text(encoding="utf-8"))["traceEvents"]
            return events


def uncaptured(engine: Engine, prepared: list[Batch]) -> list[Placed]:
    """The kernels of one step of the code that was captured, each with its modules. It is undone.

    In the run's own threads: cuDNN keeps its choice of algorithms for each thread, and these are the captured ones."""
    step, owners, recording = engine.guarded, dict[int, Modules](), Recording(engine.guarded.device)
    with undone(step), seen_by(step, lambda: record_function(COMPUTING)), recording:
        step.compute(_noting_owners(engine, owners), prepared)
    return placed(recording.events(), owners, CompiledCode(_generated_code(), _nodes(engine, prepared)))


def _noting_owners(engine: Engine, owners: dict[int, Modules]) -> LossFn:
    loss_fn = engine.loss_into([])

    def loss(batch: Any) -> tuple[Tensor, Tensor | float]:
        value, weight = loss_fn(batch)
        owners.update(owners_of_nodes(value, engine.guarded.model))
        return value, weight

    return loss


def _nodes(engine: Engine, prepared: list[Batch]) -> list[dict[str, str]]:
    step = engine.guarded
    recorder = NodeRecorder(names_in(step.model, modules_of(engine.parts.workload.frozen)))
    region = recorder.traced(engine.parts.eager)

    def loss(batch: Any) -> tuple[Tensor, Tensor | float]:
        with chains(on=True):
            value, weight, _ = region(batch)
        return value, weight

    with undone(step):
        step.compute(loss, prepared)
    return recorder.graphs


def _generated_code() -> list[str]:
    """The text of all that inductor has made in this process."""
    from torch._inductor.codecache import PyCodeCache

    files = (getattr(module, "__file__", None) for module in PyCodeCache.modules if hasattr(module, "call"))
    return [Path(file).read_text(encoding="utf-8") for file in files if file is not None and Path(file).is_file()]
