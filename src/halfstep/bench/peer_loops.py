"""The training loops of the peers, as their users write them.

Plain: PyTorch's mixed-precision recipe, with autocast, GradScaler for fp16 and clipping after unscaling.

Lightning: a LightningModule handed to a Trainer that owns the loop. The whole module goes through torch.compile, as its
documentation shows, and with `training_step` the loss: so the two variants differ by layout, optimizer and flags only.
Logger, checkpoints, progress bar and model summary are off, as nothing else that is timed has them.

Accelerate: `prepare`, `backward` and `clip_grad_norm_` of an Accelerator in the user's own loop. Documented, its
TorchDynamoPlugin compiles the model and the loader copies as it does by default. Tuned, the prepared model is compiled
together with the loss and the loader's copies do not wait.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from halfstep.bench.peer_setup import LossOf, PeerMissing, PeerSetup, float32_as_asked
from halfstep.bench.problem import AfterStep, Batch

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


def train_plain(setup: PeerSetup, steps: int, after_step: AfterStep) -> float:
    """Stock PyTorch, with the loss read once, at the end."""
    problem, device = setup.problem, setup.problem.device
    model = setup.model().to(device)
    optimizer = setup.optimizer(model)
    scaler = torch.amp.GradScaler(device.type, enabled=setup.precision == "fp16")
    autocast = torch.autocast(
        device.type, dtype=AUTOCAST.get(setup.precision, torch.bfloat16), enabled=setup.precision in AUTOCAST
    )
    loss_of = _loss_of(setup, model)
    loss = torch.tensor(float("nan"))
    for host_batch in setup.loader(steps):
        optimizer.zero_grad()
        batch = {name: part.to(device, non_blocking=True) for name, part in host_batch.items()}
        with autocast:
            loss = loss_of(batch)
        scaler.scale(loss).backward()
        if problem.clip_norm > 0:
            scaler.unscale_(optimizer)
            clip_grad_norm_(model.parameters(), problem.clip_norm)
        scaler.step(optimizer)
        scaler.update()
        after_step()
    return float(loss)


def _loss_of(setup: PeerSetup, model: nn.Module) -> LossOf:
    if setup.by_hand:
        return setup.compiled_loss(model)
    compiled = cast(nn.Module, torch.compile(model, backend=setup.compiler))
    return functools.partial(setup.loss, compiled)


PRECISION = {"fp32": "32-true", "tf32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}
IMPORT_NAMES = ("lightning.pytorch", "pytorch_lightning")
"""The two packages it is published as."""


def import_lightning() -> Any:
    """The package under either of its names, or how to get it."""
    reasons = []
    for name in IMPORT_NAMES:
        try:
            return importlib.import_module(name)
        except ImportError as error:
            reasons.append(str(error))
    raise PeerMissing("lightning cannot be imported", why="; ".join(reasons), fix="pip install lightning")


def train_lightning(setup: PeerSetup, steps: int, after_step: AfterStep) -> float:
    """Lightning's Trainer around the problem."""
    lightning = import_lightning()
    device = setup.problem.device
    module = _module(lightning, setup)
    counter = _counter(lightning, after_step)
    trainer = lightning.Trainer(
        accelerator=device.type,
        devices=1 if device.type == "cpu" else [device.index or 0],
        precision=PRECISION[setup.precision],
        max_steps=steps,
        gradient_clip_val=setup.problem.clip_norm,
        benchmark=setup.by_hand or None,
        callbacks=[counter],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    compiled = torch.compile(module, backend=setup.compiler, mode=setup.compile_mode)
    try:
        trainer.fit(compiled, setup.loader(steps))
    except SystemExit as stopped:  # what it makes of Ctrl-C
        raise KeyboardInterrupt from stopped
    return float(counter.loss)


def _module(lightning: Any, setup: PeerSetup) -> Any:
    class PeerModule(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = setup.model()

        def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
            return setup.loss(self.model, batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            # In fp16 it leaves unscaling to a fused optimizer, and clipping before that would clip scaled gradients.
            clips_scaled = setup.precision == "fp16" and setup.problem.clip_norm > 0
            return setup.optimizer(self.model, may_fuse=not clips_scaled)

    class ClippingModule(PeerModule):
        """Under autocast the Trainer's own clipping refuses every fused optimizer, so its user takes the hook."""

        def configure_gradient_clipping(
            self, optimizer: Any, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
        ) -> None:
            if gradient_clip_val:
                clip_grad_norm_(self.model.parameters(), gradient_clip_val)

    return ClippingModule() if setup.by_hand and setup.precision == "bf16" else PeerModule()


def _counter(lightning: Any, after_step: AfterStep) -> Any:
    class Counter(lightning.Callback):  # type: ignore[misc]
        loss = torch.tensor(float("nan"))

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.loss = outputs["loss"]
            after_step()

    return Counter()


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
