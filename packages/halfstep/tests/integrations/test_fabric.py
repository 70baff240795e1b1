"""Loops over Lightning Fabric, under both of its package names, with the real package on the CPU."""

from __future__ import annotations

import importlib
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import halfstep as hs
from halfstep.errors import ConfigError
from host_faults import (
    FAULTS,
    Net,
    assert_bad_steps_change_nothing,
    copy_state,
    find_dropped,
    make_data,
    same_bits,
    seeded,
)
from ranks_together import be_rank, together

pytest.importorskip("lightning")

PACKAGES = ("lightning.fabric", "lightning_fabric")


class Script:
    """A training script as Fabric's documentation writes it, with and without the guard."""

    def __init__(
        self, package: str = PACKAGES[0], *, guarded: bool = True, accumulate: int = 1,
        clip: dict[str, float] | None = None, precision: Any = "32-true",
        devices: int = 1, strategy: str = "auto", **more: Any,
    ) -> None:  # fmt: skip
        host = importlib.import_module(package)
        plugins = [host.plugins.MixedPrecision(precision, "cpu")] if precision == "16-mixed" else None
        self.fabric = host.Fabric(
            accelerator="cpu",
            devices=devices,
            strategy=strategy,
            plugins=plugins,
            **({} if plugins else {"precision": precision}),
        )
        model: Any = seeded(Net)
        self.net, self.accumulate, self.clip = model, accumulate, clip
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2, fused=True)
        self.scheduler: Any = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
        if devices > 1:
            self.fabric.launch()
        self.model, self.optimizer = self.fabric.setup(model, optimizer)
        if guarded:
            self.guard = hs.integrations.lightning.guard(
                self.fabric, self.model, self.optimizer, max_consecutive=9, **more
            )
            self.scheduler = self.guard.follow(self.scheduler)
        self.x, self.y = make_data(512)
        self.num = 0

    def train(self, num_steps: int, fault: Any = None) -> None:
        for _ in range(num_steps):
            self.net.fault = fault
            for _ in range(self.accumulate):
                rows = slice(8 * (self.num % 64), 8 * (self.num % 64) + 8)
                self.num += 1
                loss = self.model(self.x[rows], self.y[rows])["loss"] / self.accumulate
                self.fabric.backward(loss)
            if self.clip:
                self.fabric.clip_gradients(self.model, self.optimizer, **self.clip)
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()

    @property
    def state(self) -> list[Any]:
        scaler = getattr(self.fabric.strategy.precision, "scaler", None)
        return copy_state(self.model, self.optimizer, self.scheduler, *([scaler] if scaler is not None else []))


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_guarded_loop_without_faults_equals_fabrics_own(package: str, accumulate: int) -> None:
    scripts = [Script(package, guarded=one, accumulate=accumulate, clip={"max_norm": 0.5}) for one in (False, True)]
    for script in scripts:
        script.train(30)
    assert same_bits(scripts[0].state, scripts[1].state)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_bad_step_leaves_everything_as_it_was(precision: str, accumulate: int) -> None:
    script = Script(precision=precision, accumulate=accumulate)
    assert_bad_steps_change_nothing(script, is_fp16=precision == "16-mixed")


@pytest.mark.parametrize("clip", [{"max_norm": 0.1}, {"clip_val": 0.1}])
def test_clipping_neither_raises_nor_hides_a_bad_gradient(clip: dict[str, float]) -> None:
    """Fabric's default is error_if_nonfinite=True."""
    script = Script(clip=clip)
    script.train(2)
    before = script.state
    script.train(1, "gradient")
    assert same_bits(before, script.state)


@pytest.mark.parametrize("made_from", ["inner", "wrapped"])
@pytest.mark.parametrize("is_followed", [False, True])
def test_torch_does_not_warn_of_the_order_of_schedulers(made_from: str, is_followed: bool) -> None:
    script = Script(guarded=False)
    optimizer = script.optimizer if made_from == "wrapped" else script.optimizer.optimizer
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    guard = hs.integrations.lightning.guard(script.fabric, script.model, script.optimizer)
    script.scheduler = guard.follow(scheduler) if is_followed else scheduler
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        script.train(3)
    assert [str(one.message) for one in found] == []
    assert scheduler.last_epoch == 3


def test_wrong_use_is_refused() -> None:
    script = Script()
    guard = hs.integrations.lightning.guard
    with pytest.raises(ConfigError, match="already guarded"):
        guard(script.fabric, script.model, script.optimizer)
    script.guard.close()
    with pytest.raises(ConfigError, match="Net was not prepared by this Fabric"):
        guard(script.fabric, script.net, script.optimizer)
    with pytest.raises(ConfigError, match="AdamW was not prepared by this Fabric"):
        guard(script.fabric, script.model, script.optimizer.optimizer)
    with pytest.raises(ConfigError, match="not Linear"):
        guard(torch.nn.Linear(1, 1), script.model, script.optimizer)
    made = guard(script.fabric, script.model, script.optimizer)
    with pytest.raises(ConfigError, match="closure"):
        script.optimizer.step(lambda: F.relu(torch.zeros(1)))
    made.close()


# --- two ranks ---


def train_on_a_rank(rank: int, size: int, port: int) -> list[bool]:
    be_rank(rank, size, port)
    return find_dropped(Script(devices=size, strategy="ddp"), rank)


@pytest.mark.ranks
def test_two_ranks_drop_the_same_steps(tmp_path: Path) -> None:
    assert together(2, train_on_a_rank, tmp_path) == [[True] * len(FAULTS)] * 2
