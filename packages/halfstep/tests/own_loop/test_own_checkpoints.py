"""Checkpoint code that a script already has: torch.save of model, optimizer and scheduler around `schedule=`.

Each resumed loop is compared with a plain torch loop that is never stopped, bit for bit: the CPU's rates are fp64."""

from __future__ import annotations

import copy
import io
import json
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import halfstep as hs
from halfstep.errors import CheckpointError, ConfigError
from replay_stand_in import replays_on_cpu

TORCH = torch.optim.lr_scheduler
pytestmark = pytest.mark.filterwarnings("ignore:.*holds no position in the data")

NUM_STEPS, SAVED_AT = 9, 4


def halve(step: int) -> float:
    return 0.5 ** (step // 2)


class Halve:
    """A schedule that is an object, whose attributes LambdaLR stores."""

    def __init__(self) -> None:
        self.largest = 0

    def __call__(self, step: int) -> float:
        self.largest = max(self.largest, step)
        return halve(step)


def warm_up(optimizer: torch.optim.Optimizer) -> Any:
    return TORCH.LinearLR(optimizer, 0.1, 1.0, 3)


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "step": lambda o: TORCH.StepLR(o, 3, 0.1),
    "function": lambda o: TORCH.LambdaLR(o, halve),
    "object": lambda o: TORCH.LambdaLR(o, Halve()),
    "product": lambda o: TORCH.MultiplicativeLR(o, lambda step: 0.9),
    "cosine": lambda o: TORCH.CosineAnnealingLR(o, 12),
    "restarts": lambda o: TORCH.CosineAnnealingWarmRestarts(o, 3, 2),
    "sequence": lambda o: TORCH.SequentialLR(o, [warm_up(o), TORCH.CosineAnnealingLR(o, 12)], [3]),
    "chain": lambda o: TORCH.ChainedScheduler([warm_up(o), TORCH.ExponentialLR(o, 0.9)]),
    "one cycle": lambda o: TORCH.OneCycleLR(o, 0.1, 12),
    "cycles": lambda o: TORCH.CyclicLR(o, 0.01, 0.1, 3),
    "plateau": lambda o: TORCH.ReduceLROnPlateau(o, patience=0, factor=0.5),
}
METRICS = [1.0, 2.0, 0.5, 0.6, 0.7, 0.4, 0.8, 0.9, 0.3]

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd, fused": lambda ps: torch.optim.SGD(ps, 0.1, momentum=0.9, fused=True),
    "sgd": lambda ps: torch.optim.SGD(ps, 0.1, momentum=0.9),
    "adamw, fused": lambda ps: torch.optim.AdamW(ps, 0.01, fused=True),
    "adamw": lambda ps: torch.optim.AdamW(ps, 0.01),
    "nadam": lambda ps: torch.optim.NAdam(ps, 0.01),
}


class Script:
    """A training script that stores model, optimizer and scheduler with its own code."""

    def __init__(self, scheduler: str, optimizer: str = "sgd, fused", every: str = "step") -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(3, 2)
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of SequentialLR, which passes an epoch to its own parts
            self.scheduler = SCHEDULERS[scheduler](self.optimizer)
        self.every = "validation" if scheduler == "plateau" else every
        self.batches = [torch.randn(4, 3) for _ in range(NUM_STEPS)]
        self.step: hs.Step | None = None

    def guard(self, **more: Any) -> Script:
        pace = {"step": hs.per_step, "epoch": hs.per_epoch, "validation": lambda scheduler: scheduler}[self.every]
        self.step = hs.Step(self.model, self.optimizer, "fp32", schedule=pace(self.scheduler), **more)
        return self

    def compute_loss(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x).square().mean()

    def train(self, first: int, last: int) -> Script:
        for number in range(first, last):
            self._train_guarded(number) if self.step is not None else self._train_plain(number)
        return self

    def _train_guarded(self, number: int) -> None:
        self.step(self.compute_loss, [self.batches[number]])
        if self.every == "epoch":
            self.step.epoch_ended()
        if self.every == "validation":
            self.step.validated(METRICS[number])

    def _train_plain(self, number: int) -> None:
        self.optimizer.zero_grad()
        self.compute_loss(self.batches[number]).backward()
        self.optimizer.step()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.scheduler.step(METRICS[number]) if self.every == "validation" else self.scheduler.step()

    def save(self) -> bytes:
        parts = {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}
        stored = io.BytesIO()
        torch.save({name: part.state_dict() for name, part in parts.items()}, stored)
        return stored.getvalue()

    def load(self, stored: bytes, *names: str) -> Script:
        state = torch.load(io.BytesIO(stored), weights_only=False)
        for name in names or ("model", "optimizer", "scheduler"):
            getattr(self, name).load_state_dict(state[name])
        return self


def read(stored: bytes) -> Any:
    return torch.load(io.BytesIO(stored), weights_only=False)


def assert_equal(found: Any, expected: Any, where: str = "") -> None:
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for key in expected:
            assert_equal(found[key], expected[key], f"{where}.{key}")
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected), where
        for number, pair in enumerate(zip(found, expected, strict=True)):
            assert_equal(*pair, f"{where}[{number}]")
    elif isinstance(expected, torch.Tensor):
        assert torch.equal(found, expected), where
    else:
        assert (found, type(found)) == (expected, type(expected)), where


EVERY = ["step", "epoch"]
CASES = [(scheduler, optimizer) for scheduler in SCHEDULERS for optimizer in ("sgd, fused", "adamw")]
CASES += [(scheduler, optimizer) for scheduler in ("step", "one cycle") for optimizer in OPTIMIZERS]


# --- what is stored, and resumed ---


@pytest.mark.parametrize("every", EVERY)
@pytest.mark.parametrize(("scheduler", "optimizer"), dict.fromkeys(CASES))
def test_a_script_stores_the_bits_that_a_plain_loop_stores(scheduler: str, optimizer: str, every: str) -> None:
    plain = Script(scheduler, optimizer).train(0, SAVED_AT)
    script = Script(scheduler, optimizer, every).guard().train(0, SAVED_AT)
    assert_equal(read(script.save()), read(plain.save()))
    assert script.scheduler.get_last_lr() == plain.scheduler.get_last_lr()


@pytest.mark.parametrize("made", ["first", "last"])
@pytest.mark.parametrize("every", EVERY)
@pytest.mark.parametrize(("scheduler", "optimizer"), dict.fromkeys(CASES))
def test_a_resumed_script_equals_one_that_was_never_stopped(
    scheduler: str, optimizer: str, every: str, made: str
) -> None:
    plain = Script(scheduler, optimizer).train(0, NUM_STEPS)
    stored = Script(scheduler, optimizer, every).guard().train(0, SAVED_AT).save()
    script = Script(scheduler, optimizer, every)
    resumed = script.guard().load(stored) if made == "first" else script.load(stored).guard()
    resumed.train(SAVED_AT, NUM_STEPS)
    assert_equal(read(resumed.save()), read(plain.save()))


@pytest.mark.parametrize("order", [("scheduler", "optimizer", "model"), ("optimizer", "model", "scheduler")])
@pytest.mark.parametrize("made", ["first", "last"])
@pytest.mark.parametrize("scheduler", ["step", "one cycle", "plateau"])
def test_states_may_be_loaded_in_any_order(scheduler: str, made: str, order: tuple[str, ...]) -> None:
    plain = Script(scheduler).train(0, NUM_STEPS)
    stored = Script(scheduler).train(0, SAVED_AT).save()  # of a plain loop
    script = Script(scheduler)
    resumed = script.guard().load(stored, *order) if made == "first" else script.load(stored, *order).guard()
    assert_equal(read(resumed.train(SAVED_AT, NUM_STEPS).save()), read(plain.save()))


@pytest.mark.parametrize("stored_as", ["sgd", "sgd, fused"])
@pytest.mark.parametrize("made_as", ["sgd", "sgd, fused"])
def test_a_state_of_an_optimizer_in_another_form_is_loaded(made_as: str, stored_as: str) -> None:
    """torch's load_state_dict takes over `fused`, too: bad steps must still change nothing."""
    stored = Script("step", stored_as).guard().train(0, SAVED_AT).save()
    resumed = Script("step", made_as).guard().load(stored).train(SAVED_AT, SAVED_AT + 1)
    assert resumed.step is not None
    before = read(resumed.save())
    assert not resumed.step(resumed.compute_loss, [torch.full((4, 3), float("nan"))]).committed
    assert_equal(read(resumed.save()), before)
    resumed.train(SAVED_AT + 1, NUM_STEPS)
    plain = Script("step", stored_as).train(0, NUM_STEPS)
    torch.testing.assert_close(resumed.model.weight, plain.model.weight)


def test_a_state_that_hs_saves_is_loaded_into_an_optimizer_in_another_form() -> None:
    saved = Script("step", "sgd").guard().train(0, SAVED_AT)
    resumed = Script("step", "sgd, fused").guard()
    resumed.model.load_state_dict(saved.model.state_dict())
    resumed.step.load_state_dict(saved.step.state_dict())
    resumed.train(SAVED_AT, NUM_STEPS)
    assert torch.equal(resumed.model.weight, saved.train(SAVED_AT, NUM_STEPS).model.weight)


# --- the scheduler object ---


def test_the_scheduler_follows_two_steps_late_and_its_state_is_exact() -> None:
    script = Script("step").guard()
    seen = []
    for number in range(5):
        script.train(number, number + 1)
        seen.append(script.scheduler.last_epoch)
    assert seen == [0, 0, 1, 2, 3]
    assert script.scheduler.state_dict()["last_epoch"] == script.scheduler.last_epoch == 5
    script.train(5, 6)
    assert script.scheduler.last_epoch == 5


def test_dropped_steps_do_not_move_the_scheduler() -> None:
    script = Script("step").guard(guard={"max_consecutive": 9})
    assert script.step is not None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number in range(4):
            script.step(script.compute_loss, [torch.full((4, 3), float("nan"))])
            script.train(number, number + 1)
    assert script.scheduler.state_dict()["last_epoch"] == 4
    assert script.scheduler.get_last_lr() == pytest.approx([0.01])


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_a_copy_of_the_scheduler_is_of_its_own_class_and_follows_nothing(scheduler: str) -> None:
    script = Script(scheduler)
    kind = type(script.scheduler)
    script.guard().train(0, 3)
    assert isinstance(script.scheduler, kind)
    assert type(script.scheduler).__name__ == kind.__name__
    other = copy.deepcopy(script.scheduler)
    assert type(other) is kind
    then = copy.deepcopy(other.state_dict())
    script.train(3, 5)
    assert_equal(other.state_dict(), then)


@pytest.mark.parametrize("scheduler", ["step", "cosine", "one cycle", "sequence", "plateau", "cycles"])
def test_the_state_of_the_scheduler_is_plain(scheduler: str) -> None:
    state = Script(scheduler).guard().train(0, 3).scheduler.state_dict()
    assert_equal(pickle.loads(pickle.dumps(state)), state)
    assert json.loads(json.dumps(state)).keys() == state.keys()
    stored = io.BytesIO()
    torch.save(state, stored)
    stored.seek(0)
    torch.load(stored, weights_only=True)


def test_the_scheduler_stays_exact_after_its_step_is_gone() -> None:
    script = Script("step").guard().train(0, 5)
    script.step = None
    assert script.scheduler.state_dict()["last_epoch"] == 5
    assert script.optimizer.state_dict()["param_groups"][0]["lr"] == pytest.approx(0.01)


def test_a_second_step_takes_the_scheduler_over_where_it_is() -> None:
    plain = Script("cosine").train(0, NUM_STEPS)
    script = Script("cosine").guard().train(0, 4).guard().train(4, NUM_STEPS)
    assert_equal(read(script.save()), read(plain.save()))
    script.optimizer.param_groups[0]["lr"] = 0.5
    script.step = hs.Step(script.model, script.optimizer, "fp32")  # the user drives the rate from now on
    assert script.optimizer.state_dict()["param_groups"][0]["lr"] == 0.5


def test_a_schedule_that_has_ended_is_stored() -> None:
    model = nn.Linear(3, 2)
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    scheduler = TORCH.LambdaLR(optimizer, [1.0, 0.5].__getitem__)
    step = hs.Step(model, optimizer, "fp32", schedule=hs.per_step(scheduler))
    for _ in range(2):
        step(lambda x: model(x).mean(), [torch.ones(2, 3)])
    assert optimizer.state_dict()["param_groups"][0]["lr"] == 0.05
    assert scheduler.last_epoch == 2


@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*")
@pytest.mark.parametrize("when", ["first", "after steps", "after a state was asked for"])
def test_a_following_scheduler_that_is_also_stepped_by_hand_is_refused(when: str) -> None:
    script = Script("cosine", "sgd").guard().train(0, 0 if when == "first" else 3)
    if when == "after a state was asked for":
        script.scheduler.state_dict()
    script.scheduler.step()
    with pytest.raises(ConfigError, match="was called by hand"):
        script.train(3, 4)


# --- what cannot be right is refused ---


def test_an_optimizers_state_alone_is_refused_if_the_schedule_would_begin_again() -> None:
    stored = Script("step").guard().train(0, SAVED_AT).save()
    script = Script("step").guard().load(stored, "model", "optimizer")
    with pytest.raises(
        ConfigError, match=r"learning rate 0.01 was loaded into SGD.* which is at 0, gives 0.1"
    ) as error:
        script.train(SAVED_AT, SAVED_AT + 1)
    assert "scheduler.load_state_dict" in error.value.fix
    script.load(stored, "scheduler").train(SAVED_AT, NUM_STEPS)
    assert torch.equal(script.model.weight, Script("step").train(0, NUM_STEPS).model.weight)


def test_a_schedule_that_is_a_function_cannot_be_resumed_by_an_optimizers_state() -> None:
    script = Script("step")
    script.step = hs.Step(script.model, script.optimizer, "fp32", schedule=lambda step: 1.0)
    script.load(Script("step").train(0, 1).save(), "optimizer")  # with the rate of the beginning
    with pytest.raises(ConfigError, match=r"function per step.*which is at 0, gives 0.1"):
        script.train(0, 1)


@pytest.mark.parametrize("scheduler", ["step", "one cycle", "plateau"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw, fused"])
def test_an_optimizers_own_state_may_be_loaded_while_training(scheduler: str, optimizer: str) -> None:
    script = Script(scheduler, optimizer).guard().train(0, 5)
    script.optimizer.load_state_dict(script.optimizer.state_dict())
    plain = Script(scheduler, optimizer).train(0, NUM_STEPS)
    assert_equal(read(script.train(5, NUM_STEPS).save()), read(plain.save()))


def test_a_plateau_goes_on_from_the_rate_of_an_earlier_optimizer_as_torchs_does() -> None:
    found = []
    for script in (Script("plateau"), Script("plateau").guard()):
        early = script.train(0, 1).save()
        script.train(1, 5).load(early, "model", "optimizer").train(5, NUM_STEPS)
        found.append(read(script.save()))
    assert_equal(found[1], found[0])


def test_a_state_loaded_into_captured_steps_is_followed() -> None:
    stored = Script("cosine", "adamw, fused").train(0, SAVED_AT).save()
    plain = Script("cosine", "adamw, fused").load(stored).train(SAVED_AT, NUM_STEPS)
    with replays_on_cpu():
        script = Script("cosine", "adamw, fused").guard(fast="graph").train(0, 8)
        assert script.step.mode == "graph"
        script.load(stored).train(SAVED_AT, NUM_STEPS)
        assert script.step.mode == "graph"
    assert_equal(read(script.save())["scheduler"], read(plain.save())["scheduler"])
    torch.testing.assert_close(script.model.weight, plain.model.weight)


def test_a_state_that_does_not_load_leaves_the_scheduler_following() -> None:
    script = Script("sequence").guard().train(0, 3)
    with pytest.raises(KeyError):
        script.scheduler.load_state_dict({})
    assert script.scheduler.state_dict()["last_epoch"] == 3
    script.train(3, NUM_STEPS)
    assert torch.equal(script.model.weight, Script("sequence").train(0, NUM_STEPS).model.weight)


def test_a_parameter_group_added_after_the_step_is_still_refused() -> None:
    script = Script("step").guard().train(0, 2)
    script.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    with pytest.raises(ConfigError, match="parameter group was added"):
        script.train(2, 3)


# --- hs.save, hs.load and rollback ---


@pytest.mark.parametrize("every", EVERY)
@pytest.mark.parametrize("scheduler", ["step", "sequence", "chain", "one cycle", "plateau"])
def test_a_loaded_step_moves_the_scheduler(scheduler: str, every: str, tmp_path: Path) -> None:
    plain = Script(scheduler, every=every).train(0, NUM_STEPS)
    saved, resumed = (Script(scheduler, every=every).guard() for _ in range(2))
    hs.save(tmp_path / "last", saved.train(0, SAVED_AT).step, saved.model)
    hs.load(tmp_path / "last", resumed.step, resumed.model)
    assert_equal(resumed.scheduler.state_dict(), saved.scheduler.state_dict())
    assert_equal(read(resumed.train(SAVED_AT, NUM_STEPS).save()), read(plain.save()))


@pytest.mark.parametrize("every", EVERY)
def test_a_step_that_began_with_a_loaded_scheduler_is_resumed_by_hs_load(every: str, tmp_path: Path) -> None:
    """The scheduler of the first process was loaded at 2; that of the second process begins at 0, or at 2 again."""
    early = Script("cosine", every=every).guard().train(0, 2).save()
    plain = Script("cosine").train(0, NUM_STEPS)
    saved = Script("cosine", every=every).load(early).guard().train(2, SAVED_AT)
    hs.save(tmp_path / "last", saved.step, saved.model)
    for resumed in (Script("cosine", every=every).guard(), Script("cosine", every=every).load(early).guard()):
        hs.load(tmp_path / "last", resumed.step, resumed.model)
        assert_equal(read(resumed.train(SAVED_AT, NUM_STEPS).save()), read(plain.save()))
    late = Script("cosine", every=every).load(plain.save()).guard()
    with pytest.raises(CheckpointError, match="CosineAnnealingLR is at 9, but the state is at 4"):
        hs.load(tmp_path / "last", late.step, late.model)


def test_a_rollback_does_not_go_back_to_before_a_state_was_loaded() -> None:
    stored = Script("step").train(0, SAVED_AT).save()
    script = Script("step").guard(guard={"on_fault": "rollback", "max_consecutive": 2}).train(0, 2)
    assert script.step is not None
    script.load(stored)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(4):
            script.step(script.compute_loss, [torch.full((4, 3), float("nan"))])
    assert script.scheduler.state_dict()["last_epoch"] == SAVED_AT
    assert torch.equal(script.model.weight, read(stored)["model"]["weight"])


def test_a_rollback_moves_the_scheduler_back_and_shows_the_cut_rate() -> None:
    options = {"on_fault": "rollback", "max_consecutive": 2, "snapshot_every": 100}
    script = Script("step").guard(guard=options).train(0, 5)
    assert script.step is not None
    assert script.scheduler.state_dict()["last_epoch"] == 5
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(4):
            script.step(script.compute_loss, [torch.full((4, 3), float("nan"))])
    assert script.scheduler.last_epoch == script.scheduler.state_dict()["last_epoch"] == 0
    assert script.scheduler.get_last_lr() == pytest.approx([0.05])
    assert script.optimizer.state_dict()["param_groups"][0]["lr"] == pytest.approx(0.05)
    script.train(5, 7)
    assert script.scheduler.state_dict()["last_epoch"] == 2
