"""The loop of PyTorch's own mixed-precision recipe: autocast, GradScaler for fp16, clipping after unscaling."""

from __future__ import annotations

import functools
from typing import cast

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

from halfstep.bench.peer_setup import LossOf, PeerSetup
from halfstep.bench.problem import AfterStep

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
