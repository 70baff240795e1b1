"""What else may change under a loop's hands: sparse gradients, states that go back, optimizers emptied or wrapped."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import halfstep as hs
from halfstep.errors import ConfigError
from own_steps import X, loss_of, made, sgd

NAN = X * float("nan")


# --- sparse gradients and sparse inputs ---

SPARSE = {
    "SparseAdam": lambda weights: torch.optim.SparseAdam(weights, 0.1),
    "SGD": lambda weights: torch.optim.SGD(weights, 0.1, momentum=0.9, fused=False, foreach=False),
}


def words_and_step(name: str, **more: Any) -> tuple[nn.Embedding, hs.Step]:
    torch.manual_seed(0)
    words = nn.Embedding(6, 2, sparse=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # SGD could be fused
        return words, hs.Step(words, SPARSE[name](list(words.parameters())), more.pop("precision", "fp32"), **more)


@pytest.mark.parametrize("name", SPARSE)
def test_sparse_gradients_are_judged_clipped_and_dropped(name: str) -> None:
    words, step = words_and_step(name, clip_norm=0.1)
    twin, _ = words_and_step(name)
    optimizer = SPARSE[name](list(twin.parameters()))
    bad: list[float] = [1.0]

    def loss(x: Tensor) -> Tensor:
        return bad[0] * words(x).square().sum()

    for ids in (torch.tensor([1, 2]), torch.tensor([2, 4])):
        norm = step(loss, [ids]).grad_norm
        optimizer.zero_grad()
        twin(ids).square().sum().backward()
        values = twin.weight.grad.coalesce()._values()
        assert norm == pytest.approx(float(values.norm()), rel=1e-6)
        twin.weight.grad = twin.weight.grad.coalesce()
        twin.weight.grad._values().mul_(torch.clamp(0.1 / (values.norm() + 1e-6), max=1.0))
        optimizer.step()
    assert torch.equal(words.weight, twin.weight)
    before, state = words.weight.clone(), copy.deepcopy(step.optimizers[0].state_dict()["state"])
    bad[0] = float("nan")
    assert not step(loss, [torch.tensor([1])]).committed
    assert torch.equal(words.weight, before)
    assert str(state) == str(step.optimizers[0].state_dict()["state"])


def test_rows_that_come_twice_count_as_their_sum_over_a_window_in_fp16() -> None:
    words, step = words_and_step("SparseAdam", precision=hs.Precision("fp16", simulate=True), accumulate=2)
    twin, full = words_and_step("SparseAdam", accumulate=2)
    window = [torch.tensor([1, 1, 2]), torch.tensor([1])]
    norm = step(lambda x: words(x).square().mean(), window).grad_norm
    assert norm == pytest.approx(full(lambda x: twin(x).square().mean(), window).grad_norm, rel=5e-3)  # fp16's 11 bits


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_graph_as_a_sparse_matrix_trains_in_simulated_formats(precision: str) -> None:
    neighbours = (torch.eye(8) + torch.ones(8, 8).tril() / 8).to_sparse()
    model, step = made(precision=hs.Precision(precision, simulate=True), scaler={"init_scale": 1024})
    exact = float((neighbours @ model(X)).square().mean().detach())
    outcome = step(lambda x: (neighbours @ model(x)).square().mean(), [X])
    assert outcome.committed
    assert outcome.loss == pytest.approx(exact, rel=2e-2)  # bf16 has 8 bits


# --- going back ---


class Carried(nn.Module):
    state: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("state", torch.zeros(8, 4))


def test_a_rollback_takes_teacher_state_and_the_loss_functions_weights_along_but_no_other_network() -> None:
    student, teacher, rival, carried = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4), Carried()
    spread = nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.SGD([*student.parameters(), spread], 0.1, fused=True)

    def move(model: nn.Module) -> None:
        for slow, fast in zip(teacher.parameters(), model.parameters(), strict=True):
            slow.data.lerp_(fast, 0.1)

    step = hs.Step(
        student, optimizer, "fp32", also=[teacher, rival, carried], on_commit=move,
        guard={"on_fault": "rollback", "max_consecutive": 2, "margin": 2, "snapshot_every": 3},
    )  # fmt: skip
    at_step: list[list[Tensor]] = []

    def loss(x: Tensor) -> Tensor:
        carried.state = (carried.state[: len(x)] + x).detach()
        return F.mse_loss(student(x), teacher(x).detach()) * torch.exp(-spread) + spread + rival(x).mean() * 0

    def state() -> list[Tensor]:
        return [t.detach().clone() for t in (*student.parameters(), *teacher.parameters(), spread, carried.state)]

    for k in range(9):
        at_step.append(state())
        with torch.no_grad():
            rival.weight.add_(1)  # what its own step does
        step(loss, [X[: 8 - k]])
    step(loss, [NAN[:1]])
    step(loss, [NAN[:1]])
    with pytest.warns(UserWarning, match="rolled back to committed step 6"):
        step.finish()
    assert all(map(torch.equal, at_step[6], state()))
    assert rival.weight.min() > 8


# --- a loss of something else ---


def test_a_loss_whose_gradients_reach_no_trained_parameter_is_refused() -> None:
    tensor = torch.zeros(4, requires_grad=True)
    model = nn.ParameterList([tensor])  # wraps it in another Parameter
    step = hs.Step(model, sgd(model), "fp32")
    with pytest.raises(ConfigError, match="no gradient reached"):
        step(lambda x: (x - tensor).square().mean(), [X])
    assert step(lambda x: (x - model[0]).square().mean(), [X]).committed
    assert step.attempted == 1


def test_an_optimizer_of_the_loss_functions_own_weights_comes_with_both_modules() -> None:
    model, centres = nn.Linear(4, 4), nn.ParameterList([nn.Parameter(torch.zeros(4))])
    optimizers = [sgd(model), sgd(centres, 0.5)]
    with pytest.raises(ConfigError) as error:
        hs.Step(model, optimizers, "fp32")
    assert "ModuleList([model, criterion])" in error.value.fix
    step = hs.Step(nn.ModuleList([model, centres]), optimizers, "fp32")
    assert step(lambda x: (model(x) - centres[0]).square().mean(), [X]).committed
    assert centres[0].any()


class Slow(torch.optim.Optimizer):
    """As Lookahead and AcceleratedOptimizer: around another optimizer, without torch's constructor."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.defaults = optimizer, optimizer.defaults
        self.param_groups, self.state = optimizer.param_groups, optimizer.state
        self.slow = {p: p.detach().clone() for group in self.param_groups for p in group["params"]}

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.optimizer.step()
        for p, slow in self.slow.items():
            slow.lerp_(p.detach(), 0.5)
            p.data.copy_(slow)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)


def test_an_optimizer_around_another_is_stepped_on_good_steps_only() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = Slow(sgd(model))
    step = hs.Step(model, optimizer, "fp32")
    assert step(loss_of(model), [X]).committed
    before = [t.clone() for t in (*model.parameters(), *optimizer.slow.values())]
    assert not step(loss_of(model), [NAN]).committed
    assert all(map(torch.equal, before, (*model.parameters(), *optimizer.slow.values())))


# --- state that is exchanged under the step's hands ---

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "select": lambda weights: torch.optim.NAdam(weights, 1e-2),
    "fused SGD": lambda weights: torch.optim.SGD(weights, 0.1, momentum=0.9, fused=True),
    "fused Adam": lambda weights: torch.optim.Adam(weights, 1e-2, fused=True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("how", ["loaded", "cleared"])
def test_an_optimizer_whose_state_was_emptied_by_hand_survives_a_bad_step(name: str, how: str) -> None:
    """As a search for the learning rate does, which goes back to the start."""
    model = nn.Linear(4, 4)
    optimizer = OPTIMIZERS[name](model.parameters())
    step, empty = hs.Step(model, optimizer, "fp32"), copy.deepcopy(optimizer.state_dict())
    for _ in range(2):
        step(loss_of(model), [X])
    if how == "loaded":
        optimizer.load_state_dict(empty)
    else:
        optimizer.state.clear()
    twin = copy.deepcopy(model)
    own = OPTIMIZERS[name](twin.parameters())
    assert not step(loss_of(model), [NAN]).committed
    assert step(loss_of(model), [X]).committed
    loss_of(twin)(X).backward()
    own.step()
    assert torch.equal(model.weight, twin.weight)


class Observing(nn.Module):
    """Resizes its buffer in place when it first sees data, as observers of quantised training do."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.register_buffer("seen", torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x)
        if self.seen.shape != h.shape[1:]:
            self.seen.resize_(h.shape[1:])
        self.seen.copy_(h.detach().amax(0))
        return h.square().mean()


def test_a_buffer_that_a_bad_step_resized_has_its_shape_and_bits_again() -> None:
    model = Observing()
    step = hs.Step(model, sgd(model), "fp32")
    assert not step(model, [NAN]).committed
    assert torch.equal(model.seen, torch.ones(1))
    assert step(model, [X]).committed
    before = model.seen.clone()
    assert not step(model, [NAN]).committed
    assert torch.equal(model.seen, before)
