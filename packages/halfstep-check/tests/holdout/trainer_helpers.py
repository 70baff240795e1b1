from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

log = logging.getLogger(__name__)


@dataclass
class TrainState:
    step: int = 0
    epoch: int = 0
    history: list[float] = field(default_factory=list)


class Trainer:
    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, cfg: Any) -> None:
        self.model = model
        self.optimizer = optimizer
        self.cfg = cfg
        self.device = next(model.parameters()).device
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=cfg.precision == "fp16")
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, self._lr_lambda)
        self.state = TrainState()

    def _lr_lambda(self, step: int) -> float:
        return min(1.0, (step + 1) / self.cfg.warmup)

    def _autocast(self):
        dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(self.cfg.precision, torch.bfloat16)
        return torch.autocast(self.device.type, dtype=dtype, enabled=self.cfg.precision != "fp32")

    def _to_device(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {k: v.to(self.device, non_blocking=True) for k, v in batch.items()}

    def _forward(self, batch: dict[str, Tensor]) -> Tensor:
        with self._autocast():
            return self.model(**batch)["loss"]

    def _backward(self, loss: Tensor, window: int) -> None:
        self.scaler.scale(loss / window).backward()

    def _optimizer_step(self) -> bool:
        self.scaler.unscale_(self.optimizer)
        if self.cfg.max_norm:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.cfg.max_norm)
        before = self.scaler.get_scale()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        return self.scaler.get_scale() >= before

    def fit(self, loader: Iterable[dict[str, Tensor]], epochs: int) -> None:
        n = len(loader)
        for _ in range(epochs):
            self.model.train()
            for i, batch in enumerate(loader):
                start = i - i % self.cfg.accum
                window = min(self.cfg.accum, n - start)
                loss = self._forward(self._to_device(batch))
                self._backward(loss, window)
                if (i + 1) % self.cfg.accum == 0 or i + 1 == n:
                    if self._optimizer_step():
                        self.scheduler.step()
                    self.state.step += 1
                    if self.state.step % self.cfg.log_every == 0:
                        log.info("step %d loss %.4f", self.state.step, loss.item())
            self.state.epoch += 1
            self.save("last.pt")

    @torch.no_grad()
    def evaluate(self, loader: Iterable[dict[str, Tensor]]) -> float:
        self.model.eval()
        losses = [self._forward(self._to_device(b)).float() for b in loader]
        return torch.stack(losses).mean().item()

    def save(self, path: str) -> None:
        torch.save({
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "scaler": self.scaler.state_dict(),
            "state": self.state.__dict__,
        }, path)

    def load(self, path: str) -> None:
        blob = torch.load(path, map_location=self.device)
        for name in ("model", "optimizer", "scheduler", "scaler"):
            getattr(self, name).load_state_dict(blob[name])
        self.state = TrainState(**blob["state"])
