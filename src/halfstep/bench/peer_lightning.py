"""Lightning: a LightningModule handed to a Trainer that owns the loop.

As its documentation shows, the whole LightningModule goes through torch.compile, which takes in `training_step` and
with it the loss: so the two variants differ by layout, optimizer and flags only. Logger, checkpoints, progress bar and
model summary are off in both, as nothing else that is timed has them.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from halfstep.bench.peer_setup import PeerMissing, PeerSetup
from halfstep.bench.problem import AfterStep, Batch

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
