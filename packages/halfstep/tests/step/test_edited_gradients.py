"""Gradients of the user's own making: a hook edits them before the verdict; behind its back they are refused."""

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
from halfstep.errors import ConfigError, ModelError, TrainingStopped
from halfstep.step import forward_writes
from tiny_training import assert_same_bits, batch, everything, loss_of, make_model, poisoned


def made(on_gradients=None, precision: str = "fp32", **more: object) -> hs.Step:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    simulate = precision != "fp32"
    return hs.Step(model, optimizer, hs.Precision(precision, simulate=simulate), on_gradients=on_gradients, **more)


def halve(model: nn.Module) -> None:
    for weight in model.parameters():
        if weight.grad is not None:
            weight.grad.mul_(0.5)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_hook_sees_unscaled_gradients_before_clipping(precision: str, accumulate: int) -> None:
    seen: list[float] = []

    def look(model: nn.Module) -> None:
        seen.append(float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])))

    hooked = made(look, precision, accumulate=accumulate, clip_norm=1e-3)
    plain = made(None, precision, accumulate=accumulate, clip_norm=1e-3)
    window = [batch(k) for k in range(accumulate)]
    norm = plain(loss_of(plain.model), window).reading.grad_norm
    assert hooked(loss_of(hooked.model), window).reading.grad_norm == pytest.approx(norm, rel=1e-5)
    assert seen == pytest.approx([norm], rel=1e-5)
    assert norm > 1e-3


def test_norm_and_clipping_are_of_what_the_hook_left() -> None:
    plain, halved = made(), made(halve)
    norm = plain(loss_of(plain.model), [batch(0)]).reading.grad_norm
    assert halved(loss_of(halved.model), [batch(0)]).reading.grad_norm == pytest.approx(norm / 2, rel=1e-6)


def test_a_hook_that_leaves_a_nan_makes_the_step_bad() -> None:
    def spoil(model: nn.Module) -> None:
        model.head.weight.grad[0, 0] = float("nan")

    step = made(spoil)
    before = everything(step._step)
    outcome = step(loss_of(step.model), [batch(0)])
    assert outcome.reason == "gradient norm is nan"
    assert_same_bits(before, everything(step._step))


def test_a_hook_may_replace_or_drop_gradients() -> None:
    def only_the_head(model: nn.Module) -> None:
        for name, weight in model.named_parameters():
            weight.grad = weight.grad.clone() if name.startswith("head") else None

    step = made(only_the_head)
    before = everything(step._step)
    assert step(loss_of(step.model), [batch(0)]).committed
    after = everything(step._step)
    assert torch.equal(before["model.conv.weight"], after["model.conv.weight"])
    assert not torch.equal(before["model.head.weight"], after["model.head.weight"])


def test_a_hook_that_hides_an_overflow_does_not_hide_it_from_the_loss_scale() -> None:
    def tidy(model: nn.Module) -> None:
        for weight in model.parameters():
            weight.grad.nan_to_num_(0.0, 0.0, 0.0)

    step = made(tidy, "fp16")
    loss_fn = loss_of(step.model)
    assert not step(lambda b: loss_fn(b) * 1e5, [batch(0)]).committed
    assert step.scaler.value.item() == 32768
    without_scaling = made(tidy)
    loss_fn32 = loss_of(without_scaling.model)
    assert without_scaling(lambda b: loss_fn32(b) + 0 * without_scaling.model.head.weight.sum(), [batch(0)]).committed


EDITS = {
    "in place": lambda model: model.head.weight.grad.mul_(2),
    "planted": lambda model: model.head.weight.grad.__setitem__((0, 0), float("nan")),
    "replaced": lambda model: setattr(model.head.weight, "grad", torch.zeros_like(model.head.weight)),
    "dropped": lambda model: setattr(model.head.weight, "grad", None),
    "clipped": lambda model: torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3),
}


@pytest.mark.parametrize("edit", sorted(EDITS))
def test_gradients_changed_between_compute_and_commit_are_refused_and_nothing_is_lost(edit: str) -> None:
    step = made()
    loss_fn = loss_of(step.model)
    step(loss_fn, [batch(0)])
    before = everything(step._step)
    facts = step.compute(loss_fn, [batch(1)])
    EDITS[edit](step.model)
    with pytest.raises(ConfigError, match="changed between compute") as refused:
        step.commit(facts)
    assert "on_gradients=" in refused.value.fix
    assert_same_bits(before, everything(step._step))
    assert step.attempted == 1
    assert step(loss_fn, [batch(1)]).committed


def test_looking_at_gradients_between_compute_and_commit_is_allowed() -> None:
    looked, plain = made(), made()
    facts = looked.compute(loss_of(looked.model), [batch(0)])
    assert all(bool(weight.grad.isfinite().all()) for weight in looked.model.parameters())
    looked.commit(facts)
    plain(loss_of(plain.model), [batch(0)])
    assert_same_bits(everything(plain._step), everything(looked._step))


def test_the_guard_sees_steps_made_by_compute_and_commit() -> None:
    step = made()
    for _ in range(6):
        step.commit(step.compute(loss_of(step.model), [poisoned()]))
    facts = step.compute(loss_of(step.model), [poisoned()])
    with pytest.raises(TrainingStopped, match="5 bad steps in a row") as stopped:
        step.commit(facts)
    assert "clip_norm" in stopped.value.fix


def test_facts_that_are_not_committed_yet_cannot_be_read() -> None:
    step = made()
    facts = step.compute(loss_of(step.model), [batch(0)])
    with pytest.raises(ConfigError, match="cannot be read yet") as refused:
        facts.read()
    assert "step.commit(facts)" in refused.value.fix
    step.commit(facts)
    assert not facts.read().is_bad


def test_facts_are_committed_once_and_only_those_of_the_last_compute() -> None:
    seen: list[int] = []
    step = made(on_outcome=lambda outcome: seen.append(outcome.step))
    first = step.compute(loss_of(step.model), [batch(0)])
    second = step.compute(loss_of(step.model), [poisoned()])
    before = everything(step._step)
    with pytest.raises(ConfigError, match="facts of the last compute"):
        step.commit(first)
    assert_same_bits(before, everything(step._step))
    step.commit(second)
    with pytest.raises(ConfigError, match="facts of the last compute"):
        step.commit(second)
    step.finish()
    assert seen == [0]
    assert step.attempted == 1


class NeedsClosure(torch.optim.SGD):
    def step(self, closure=None):
        assert closure is not None, "Sharpness Aware Minimization requires closure"


class NeedsClosureByName(torch.optim.SGD):
    def step(self, closure):
        closure()


@pytest.mark.parametrize(
    ("kind", "error", "text"),
    [
        (NeedsClosure, AssertionError, "Sharpness Aware Minimization requires closure"),
        (NeedsClosureByName, ConfigError, "NeedsClosureByName needs a closure"),
        (torch.optim.LBFGS, ConfigError, "LBFGS needs a closure"),
    ],
)
def test_an_optimizer_that_needs_a_closure_ends_with_an_error_and_changes_nothing(
    kind: type, error: type[Exception], text: str
) -> None:
    model = make_model()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(error, match=text):
        hs.Step(model, kind(model.parameters(), lr=0.1), "fp32")(loss_of(model), [batch(0)])
    assert_same_bits(before, model.state_dict())


# --- `on_commit` moves a teacher or a target network, in good steps only ---

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


def make_with_teacher(
    move: Move, precision: str = "fp32", **more: Any
) -> tuple[hs.Step, nn.Module, Callable[..., Tensor]]:
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
    step, teacher, loss = make_with_teacher(MOVES[name], precision, scaler={"init_scale": 16})
    for k in range(6):
        before = state(step, teacher)
        step(loss, [NAN if k in (0, 1, 4) else X + k])
        if k in (0, 1, 4):
            assert_same_bits(before, state(step, teacher))
        else:
            assert not torch.equal(before["teacher 0.weight"], teacher.state_dict()["0.weight"])


@pytest.mark.parametrize("name", MOVES)
def test_good_steps_are_those_of_a_loop_that_moves_the_teacher_by_hand(name: str) -> None:
    step, teacher, loss = make_with_teacher(MOVES[name])
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
        step, teacher, loss = make_with_teacher(move, on_outcome=lambda outcome: seen.append(outcome.step), **more)
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
