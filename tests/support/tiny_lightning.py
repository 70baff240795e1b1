"""A tiny training in Lightning, of either package name, whose model a test can let fail at one batch."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from host_faults import FAULTS, Fault, Net, copy_state, make_data, seeded

PACKAGES = ("lightning.pytorch", "pytorch_lightning")
BATCH = 8


def make_module(package: str = PACKAGES[0], *, fused: bool = True, schedule: str = "step", **methods: Any) -> Any:
    """Make a LightningModule; `methods` override its hooks."""
    host = importlib.import_module(package)

    def build(self: Any) -> None:
        super(kind, self).__init__()
        self.net = seeded(Net)

    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        found = self.net(*batch)
        self.log("train_loss", found["loss"])
        self.log_dict({"largest": found["logits"].max(), "one": 1.0}, on_epoch=True)
        return {"loss": found["loss"], "logits": found["logits"]}

    def configure_optimizers(self: Any) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), 1e-2, fused=fused)
        if schedule == "none":
            return optimizer
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": schedule}}

    usual = {"__init__": build, "training_step": training_step, "configure_optimizers": configure_optimizers}
    kind: Any = type("Tiny", (host.LightningModule,), {**usual, **methods})
    return kind()


def make_loader(num_batches: int, spoil: int | None = None) -> Any:
    x, y = make_data(BATCH * num_batches)
    if spoil is not None:
        x[spoil] = float("nan")
    return DataLoader(TensorDataset(x, y), BATCH)


def make_trainer(package: str = PACKAGES[0], plugin: Any = None, **more: Any) -> Any:
    host = importlib.import_module(package)
    settings: dict[str, Any] = {
        "max_epochs": 1, "accelerator": "cpu", "devices": 1, "logger": False, "enable_checkpointing": False,
        "enable_progress_bar": False, "enable_model_summary": False,
    }  # fmt: skip
    return host.Trainer(**{**settings, **more}, **({"plugins": [plugin]} if plugin is not None else {}))


def fit(module: Any, trainer: Any, num_batches: int = 30, *, spoil: int | None = None, **more: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning's remarks on loaders, workers and logging intervals
        trainer.fit(module, make_loader(num_batches, spoil), **more)
    return trainer


def list_state(trainer: Any) -> list[Any]:
    """Copy everything that a dropped step must leave alone."""
    holders = [trainer.lightning_module, *trainer.optimizers, *(c.scheduler for c in trainer.lr_scheduler_configs)]
    scaler = trainer.precision_plugin.scaler
    averages = [c._average_model for c in trainer.callbacks if getattr(c, "_average_model", None) is not None]
    return copy_state(*holders, *([scaler] if scaler is not None else []), *averages)


def make_watcher(package: str, fault_at: dict[int, Fault], accumulate: int = 1) -> Any:
    """Make a callback that plants faults, and keeps the state around each window: `states[i]` is before window i."""
    host = importlib.import_module(package)

    class Watcher(host.Callback):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            self.states: list[Any] = []

        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx % accumulate == 0:
                self.states.append(list_state(trainer))
            pl_module.net.fault = fault_at.get(batch_idx)

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            self.states.append(list_state(trainer))

    return Watcher()


ALL_FAULTS: dict[int, Fault] = {3 * number + 7: fault for number, fault in enumerate(FAULTS)}
"""Each fault once, with good steps around it."""
