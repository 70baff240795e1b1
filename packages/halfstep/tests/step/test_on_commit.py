"""`on_commit` moves a teacher or a target network after the optimizers; where the step is bad, it has moved nothing."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import halfstep as hs
from halfstep.errors import ModelError
from halfstep.step import forward_writes
from tiny_training import assert_same_bits

X = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
NAN = torch.full((8, 4), float("nan"))
Move = Callable[[nn.Module, nn.Module], object]


@torch.no_grad()
def through_data(student: nn.Module, teacher: nn.Module) -> None:
    for own, other in zip(teacher.parameters(), student.parameters(), strict=True):
        own.data.mul_(0.9).add_(0.1 * other.data)


def by_new_storage(student: nn.Module, teacher: nn.Module) -> None:
    for own, other in zip(teacher.parameters(), student.parameters(), strict=True):
        own.data = own.data * 0.9 + other.data * 0.1


def by_loading(student: nn.Module, teacher: nn.Module) -> None:
    teacher.load_state_dict(student.state_dict())


MOVES: dict[str, Move] = {"data": through_data, "storage": by_new_storage, "load": by_loading}


def pair() -> tuple[nn.Sequential, nn.Sequential]:
    torch.manual_seed(0)
    student = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    return student, copy.deepcopy(student).requires_grad_(False)


def made(move: Move, precision: str = "fp32", **more: Any) -> tuple[hs.Step, nn.Module, Callable[[Tensor], Tensor]]:
    student, teacher = pair()
    optimizer = torch.optim.AdamW(student.parameters(), 1e-2, fused=True)
    step = hs.Step(
        student, optimizer, hs.Precision(precision, simulate=precision != "fp32"), also=[teacher],
        on_commit=lambda model: move(model, teacher), **more,
    )  # fmt: skip
    return step, teacher, lambda x: F.mse_loss(student(x), teacher(x + 1))


def state(step: hs.Step, teacher: nn.Module) -> dict[str, Tensor]:
    parts = {"student": step.model.state_dict(), "teacher": teacher.state_dict()}
    parts |= {f"state {number}": own for number, own in step.optimizers[0].state_dict()["state"].items()}
    return {f"{part} {name}": value.clone() for part, values in parts.items() for name, value in values.items()}


@pytest.mark.parametrize("name", MOVES)
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_bad_step_leaves_the_teacher_where_it_was(name: str, precision: str) -> None:
    step, teacher, loss = made(MOVES[name], precision, scaler={"init_scale": 16})
    for k in range(6):
        before = state(step, teacher)
        step(loss, [NAN if k in (0, 1, 4) else X + k])
        if k in (0, 1, 4):
            assert_same_bits(before, state(step, teacher))
        else:
            assert not torch.equal(before["teacher 0.weight"], teacher.state_dict()["0.weight"])


@pytest.mark.parametrize("name", MOVES)
def test_good_steps_are_those_of_a_loop_that_moves_the_teacher_by_hand(name: str) -> None:
    step, teacher, loss = made(MOVES[name])
    student, own = pair()
    optimizer = torch.optim.AdamW(student.parameters(), 1e-2, fused=True)
    for k in range(4):
        step(loss, [X + k])
        optimizer.zero_grad()
        F.mse_loss(student(X + k), own(X + k + 1)).backward()
        optimizer.step()
        MOVES[name](student, own)
    assert_same_bits({**step.model.state_dict()}, {**student.state_dict()})
    assert_same_bits({**teacher.state_dict()}, {**own.state_dict()})


class Both(nn.Module):
    """A momentum encoder inside of the model, held by the optimizer without ever having a gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.online = nn.Linear(4, 4)
        self.target = copy.deepcopy(self.online).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return F.mse_loss(self.online(x), self.target(x + 1))


@pytest.mark.parametrize("bad_at", [0, 1, 4])
def test_a_target_inside_the_model_is_found(bad_at: int) -> None:
    model = Both()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2, fused=True)
    step = hs.Step(model, optimizer, "fp32", on_commit=lambda m: by_new_storage(m.online, m.target))
    for k in range(6):
        before = copy.deepcopy(model.state_dict())
        step(model, [NAN if k == bad_at else X])
        moved = not torch.equal(before["target.weight"], model.target.weight)
        assert moved is (k != bad_at)


def test_a_large_target_that_a_later_bad_step_writes_for_the_first_time_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(forward_writes, "SMALL_BYTES", 0)
    model = Both()
    optimizer = torch.optim.Adam(model.online.parameters(), 1e-2, fused=True)
    step = hs.Step(model, optimizer, "fp32", on_commit=lambda m: step.attempted and by_loading(m.online, m.target))
    step(model, [X])
    with pytest.raises(ModelError, match=r"target\.weight") as error:
        step(model, [NAN])
    assert "also=" in error.value.fix


def test_a_clamp_of_the_own_weights_changes_nothing_after_a_bad_step() -> None:
    model = nn.Linear(4, 1)

    def clamp(module: nn.Module) -> None:
        for weight in module.parameters():
            weight.clamp_(-0.01, 0.01)

    step = hs.Step(model, torch.optim.RMSprop(model.parameters(), 5e-5), "fp32", on_commit=clamp)
    step(lambda x: model(x).mean(), [X])
    before = copy.deepcopy(model.state_dict())
    assert model.weight.abs().max().detach() <= 0.01
    step(lambda x: model(x).mean(), [NAN])
    assert_same_bits(before, model.state_dict())


@pytest.mark.parametrize("batch", [X, NAN], ids=["good", "bad"])
def test_a_step_whose_on_commit_raises_is_made_and_counted(batch: Tensor) -> None:
    seen: list[int] = []

    def trained(*, raises: bool) -> tuple[dict[str, Tensor], dict[str, Any]]:
        def move(student: nn.Module, teacher: nn.Module) -> None:
            if step.attempted != 2:
                through_data(student, teacher)
                return
            teacher.get_parameter("0.bias").add_(1)  # half of its work
            if raises:
                raise KeyboardInterrupt

        more = {"ema_decay": 0.9, "schedule": lambda k: 1 / (k + 1)}
        step, teacher, loss = made(move, on_outcome=lambda outcome: seen.append(outcome.step), **more)
        for k in range(5):
            with pytest.raises(KeyboardInterrupt) if raises and k == 2 else contextlib.nullcontext():
                step(loss, [batch if k == 2 else X + k])
        step.finish()
        return state(step, teacher), step.state_dict()

    (weights, stored), (own, own_stored) = trained(raises=True), trained(raises=False)
    assert_same_bits(weights, own)
    assert_same_bits(stored["ema"], own_stored["ema"])
    assert [stored[key] for key in ("attempted", "committed")] == [own_stored[k] for k in ("attempted", "committed")]
    assert seen == [0, 1, 2, 3, 4] * 2
