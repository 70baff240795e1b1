"""The guard that integrations share, in a plain torch loop that plays the host."""

from __future__ import annotations

import copy
import importlib
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from halfstep.errors import ConfigError, InstallError
from halfstep.integrations.guard import GuardedScheduler, HostGuard
from host_faults import ADVICE, FAULTS, Fault, Net, copy_state, make_data, same_bits, seeded
from operations import count_operations, make_normed

ADAMW = {"fused": lambda p: torch.optim.AdamW(p, 1e-2, fused=True), "plain": lambda p: torch.optim.AdamW(p, 1e-2)}


class Custom(torch.optim.SGD):
    """An optimizer whose step() is not torch's own: committed by the host's decision."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


ADAMW["custom"] = lambda p: Custom(p, 1e-2, momentum=0.9)


class Loop:
    """A host: it divides, clips, steps and schedules in its own order, with or without a guard."""

    def __init__(
        self, *, guarded: bool = True, make: str = "fused", schedule: Any = "auto", accumulate: int = 1,
        scaled: bool = False, **more: Any,
    ) -> None:  # fmt: skip
        self.model = seeded(Net)
        self.optimizer = ADAMW[make](self.model.parameters())
        self.scheduler: Any = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 40)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=7) if scaled else None
        self.accumulate = accumulate
        self.guard = None
        if guarded:
            self.guard = HostGuard(
                "a loop", self.model, self.optimizer, ADVICE, schedule=schedule, scaler=self.scaler, **more
            )
            self.scheduler = self.guard.follow(self.scheduler)
        self.x, self.y = make_data(256)

    def train(self, number: int, fault: Fault | None = None) -> None:
        for part in range(self.accumulate):
            self.model.fault = fault if part == 0 else None
            rows = torch.arange(8) + 8 * (number * self.accumulate + part) % 248
            loss = F.cross_entropy(self.model(self.x[rows]), self.y[rows])
            loss = loss * (float("nan") if self.model.fault == "loss" else 1.0) / self.accumulate
            if self.guard is not None:
                self.guard.record(loss)
            (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        self.step()
        self.scheduler.step()
        self.optimizer.zero_grad()

    def step(self) -> None:
        if self.guard is not None:
            self.guard.step()
        elif self.scaler is not None:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.step()

    @property
    def state(self) -> list[Any]:
        held = [self.model, self.optimizer, self.scheduler]
        return copy_state(*held, *([] if self.scaler is None else [self.scaler]))


@pytest.mark.parametrize(
    ("make", "schedule"), [("fused", "read"), ("fused", "exact"), ("plain", "auto"), ("custom", "auto")]
)
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_without_a_fault_every_bit_is_the_hosts(make: str, schedule: str, scaled: bool, accumulate: int) -> None:
    given = {"make": make, "accumulate": accumulate, "scaled": scaled}
    plain, guarded = Loop(guarded=False, **given), Loop(schedule=schedule, **given)
    for number in range(12):
        plain.train(number)
        guarded.train(number)
    assert same_bits(guarded.state, plain.state)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize(
    ("make", "schedule"), [("fused", "exact"), ("fused", "read"), ("plain", "read"), ("custom", "read")]
)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_bad_step_leaves_every_bit(fault: Fault, make: str, schedule: str, accumulate: int) -> None:
    loop = Loop(make=make, schedule=schedule, accumulate=accumulate)
    loop.train(0, fault)  # the first one, before the optimizer has state
    loop.train(1)
    loop.train(2)
    before = loop.state
    loop.train(3, fault)
    assert same_bits(loop.state, before)
    assert loop.guard is not None
    assert loop.guard.dropped
    loop.train(4)
    assert not loop.guard.dropped
    assert not same_bits(loop.state, before)
    assert (loop.guard.attempted, loop.guard.committed) == (5, 3)


@pytest.mark.parametrize("schedule", ["read", "exact"])
def test_after_a_bad_step_training_goes_on_as_if_its_batch_were_not_there(schedule: str) -> None:
    guarded, plain = Loop(schedule=schedule), Loop(guarded=False)
    for number in range(12):
        guarded.train(number, "batch" if number in (0, 5, 6) else None)
        if number not in (0, 5, 6):
            plain.train(number)
    assert same_bits(guarded.state, plain.state)


def test_closing_gives_the_loop_back() -> None:
    plain, guarded = Loop(guarded=False), Loop(schedule="exact")
    assert guarded.guard is not None
    for number in range(6):
        if number == 3:
            guarded.guard.close()
            guarded.scheduler, guarded.guard = guarded.scheduler.inner, None
        plain.train(number)
        guarded.train(number)
    assert same_bits(guarded.state, plain.state)
    HostGuard("a loop", guarded.model, guarded.optimizer, ADVICE).close()


def test_a_second_guard_is_refused() -> None:
    loop = Loop()
    with pytest.raises(ConfigError, match="already guarded"):
        HostGuard("a loop", loop.model, loop.optimizer, ADVICE)


def test_exact_needs_an_optimizer_that_reads_its_rate_on_the_device() -> None:
    with pytest.raises(ConfigError, match="schedule='exact' needs"):
        Loop(make="custom", schedule="exact")


def test_a_model_that_was_not_called_is_refused() -> None:
    loop = Loop()
    assert loop.guard is not None
    with pytest.raises(ConfigError, match="was not called since the last step"):
        loop.guard.step()


def test_two_schedulers_need_one_read_per_step() -> None:
    loop = Loop(schedule="exact")
    assert loop.guard is not None
    with pytest.raises(ConfigError, match="StepLR is the second scheduler of this optimizer"):
        loop.guard.follow(torch.optim.lr_scheduler.StepLR(loop.optimizer, 1))


def test_a_scheduler_of_momentum_is_not_kept_in_a_table() -> None:
    def make_one_cycle(loop: Loop) -> Any:
        return torch.optim.lr_scheduler.OneCycleLR(loop.optimizer, 1e-2, 20)

    loop = Loop(schedule="exact")
    assert loop.guard is not None
    loop.guard._schedulers.clear()
    with pytest.raises(ConfigError, match="OneCycleLR changes momentum, too"):
        loop.guard.follow(make_one_cycle(loop))
    plain, guarded = Loop(guarded=False), Loop()
    assert guarded.guard is not None
    guarded.guard._schedulers.clear()
    guarded.guard.schedule = "exact"  # as on a GPU
    plain.scheduler, guarded.scheduler = make_one_cycle(plain), guarded.guard.follow(make_one_cycle(guarded))
    assert guarded.guard.schedule == "read"
    for number in range(6):
        plain.train(number)
        guarded.train(number)
    assert same_bits(guarded.state, plain.state)


def test_a_second_scheduler_ends_the_table_of_the_first() -> None:
    loop, plain = Loop(schedule="exact"), Loop(guarded=False)
    assert loop.guard is not None
    loop.guard._may_read = True  # as with "auto" on a GPU
    seconds = [torch.optim.lr_scheduler.StepLR(one.optimizer, 2) for one in (loop, plain)]
    for number in range(6):
        loop.train(number)
        plain.train(number)
        if number == 1:
            seconds[0] = loop.guard.follow(seconds[0])
        if number > 1:
            for second in seconds:
                second.step()
    assert same_bits(loop.state, plain.state)


def test_the_end_says_how_many_steps_were_dropped(capsys: pytest.CaptureFixture[str]) -> None:
    loop = Loop(scaled=True)
    assert loop.guard is not None
    loop.guard.finish()
    assert capsys.readouterr().err == ""  # nothing was made yet
    for number, fault in enumerate((None, "batch", "gradient", None)):
        loop.train(number, fault)
    loop.guard.finish()
    line = "halfstep: 2 of 4 steps of a loop dropped, 1 of them overflows of fp16's gradients\n"
    assert capsys.readouterr().err == line
    loop.guard.finish()
    assert capsys.readouterr().err == ""
    assert loop.guard.num_dropped == 2


def test_a_plateau_is_left_to_the_host() -> None:
    loop = Loop()
    assert loop.guard is not None
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(loop.optimizer)
    assert loop.guard.follow(plateau) is plateau
    assert isinstance(loop.scheduler, GuardedScheduler)


def test_a_copy_of_the_model_is_not_guarded() -> None:
    """Averages of weights are made by copying the model, often after it was guarded."""
    loop = Loop()
    copied = copy.deepcopy(loop.model)
    copied(loop.x[:8])
    assert loop.guard is not None
    assert not loop.guard._step.is_open
    loop.train(0)
    assert loop.guard.attempted == 1


# --- the host's time ---


@pytest.mark.parametrize("schedule", ["read", "exact"])
def test_a_guard_adds_no_operation_per_parameter_or_buffer(schedule: Any) -> None:
    x, y = torch.randn(6, 8, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2, 3, 0, 1])

    def count(depth: int, *, guarded: bool) -> int:
        model = make_normed(depth)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        scheduler: Any = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
        guard = HostGuard("a loop", model, optimizer, ADVICE, schedule=schedule) if guarded else None
        scheduler = scheduler if guard is None else guard.follow(scheduler)

        def train() -> None:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            if guard is not None:
                guard.record(loss)
            loss.backward()
            parameters = list(model.parameters())
            norm = nn.utils.clip_grad_norm_(parameters, 1.0)
            if guard is None:
                optimizer.step()
            else:
                guard.note_norm(norm, parameters)
                guard.step()
            scheduler.step()

        return count_operations(train)

    few, many = (count(depth, guarded=True) - count(depth, guarded=False) for depth in (2, 20))
    assert few == many <= 33


@pytest.mark.parametrize("is_bad", [False, True])
def test_the_gradients_of_a_group_that_was_added_in_the_window_are_judged(is_bad: bool) -> None:
    loop, late = Loop(schedule="read"), nn.Parameter(torch.ones(3))
    loop.train(0)
    assert loop.guard is not None
    loss = F.cross_entropy(loop.model(loop.x[:8]), loop.y[:8])
    loop.guard.record(loss)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(loop.model.parameters(), 0.5)
    loop.guard.note_norm(norm, loop.model.parameters())
    late.grad = torch.full((3,), float("nan") if is_bad else 1.0)
    loop.optimizer.add_param_group({"params": [late]})
    loop.guard.step()
    assert loop.guard.dropped is is_bad
    assert bool((late == 1).all()) is is_bad


def test_an_integration_without_its_trainer_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "accelerate", None)
    monkeypatch.delitem(sys.modules, "halfstep.integrations.accelerate", raising=False)
    with pytest.raises(InstallError, match="needs accelerate, which is not installed: pip install 'accelerate>="):
        importlib.import_module("halfstep.integrations.accelerate")
