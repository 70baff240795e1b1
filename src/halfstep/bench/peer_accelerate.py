"""Hugging Face Accelerate: `prepare`, `backward` and `clip_grad_norm_` of an Accelerator, in the user's own loop.

Documented, its TorchDynamoPlugin compiles the model and the loader copies as it does by default. Tuned, the prepared
model is compiled together with the loss and the loader's copies do not wait.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Iterator
from typing import Any

import torch

from halfstep.bench.peer_setup import LossOf, PeerMissing, PeerSetup, float32_as_asked
from halfstep.bench.problem import AfterStep

MIXED_PRECISION = {"fp32": "no", "tf32": "no", "bf16": "bf16", "fp16": "fp16"}


def import_accelerate() -> Any:
    """The package, or how to get it."""
    try:
        return importlib.import_module("accelerate")
    except ImportError as error:
        raise PeerMissing("accelerate cannot be imported", why=str(error), fix="pip install accelerate") from error


def train_accelerate(setup: PeerSetup, steps: int, after_step: AfterStep) -> float:
    """Accelerate at the head of its user's loop."""
    with _accelerator(setup) as accelerator:
        model = setup.model()
        model, optimizer, loader = accelerator.prepare(model, setup.optimizer(model), setup.loader(steps))
        loss_of: LossOf = setup.compiled_loss(model) if setup.by_hand else functools.partial(setup.loss, model)
        loss = torch.tensor(float("nan"))
        for batch in loader:
            optimizer.zero_grad()
            loss = loss_of(batch)
            accelerator.backward(loss)
            if setup.problem.clip_norm > 0:
                accelerator.clip_grad_norm_(model.parameters(), setup.problem.clip_norm)
            optimizer.step()
            after_step()
        return float(loss)


@contextlib.contextmanager
def _accelerator(setup: PeerSetup) -> Iterator[Any]:
    """An Accelerator of its own: the state it shares process-wide is emptied before and after."""
    accelerate = import_accelerate()
    _reset(accelerate)
    try:
        accelerator = accelerate.Accelerator(
            cpu=setup.problem.device.type == "cpu",
            mixed_precision=MIXED_PRECISION[setup.precision],
            dynamo_plugin=accelerate.utils.TorchDynamoPlugin(backend="no" if setup.by_hand else setup.compiler),
            dataloader_config=accelerate.DataLoaderConfiguration(non_blocking=setup.by_hand),
        )
        # Once more, because its compiler plugin switches TF32 on in a run that asked for no mixed precision.
        with float32_as_asked(setup.precision, by_hand=setup.by_hand):
            yield accelerator
            accelerator.free_memory()
    finally:
        _reset(accelerate)


def _reset(accelerate: Any) -> None:
    accelerate.state.AcceleratorState._reset_state(True)
    accelerate.state.GradientState._reset_state()
