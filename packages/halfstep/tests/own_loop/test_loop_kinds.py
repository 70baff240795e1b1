"""Loops that are not one model and one batch: states carried over, inner gradients, nets with old methods."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules import module as modules_of_torch

import halfstep as hs
from halfstep.errors import ConfigError, TrainingStopped
from halfstep.own_loop.evidence import find_held_modules
from own_steps import X, loss_of, made, sgd

NAN = X * float("nan")


def over(step: hs.Step, loss: Callable[[Tensor], Tensor], batches: list[Tensor]) -> None:
    for window in step.windows(batches):
        step(loss, window)


# --- a state carried from batch to batch ---


def test_a_state_in_a_variable_that_became_nan_is_named_when_training_stops() -> None:
    model = nn.GRUCell(4, 4)
    step = hs.Step(model, sgd(model), "fp32", guard={"max_consecutive": 2})
    carried = {"hidden": (torch.zeros(8, 4), torch.ones(1))}

    def loss(x: Tensor) -> Tensor:
        new = model(x, carried["hidden"][0])
        carried["hidden"] = (new.detach(), torch.ones(1))
        return new.square().mean()

    with pytest.raises(TrainingStopped) as error:
        over(step, loss, [X, NAN, X, X, X, X])
    assert "carried['hidden'][0]" in error.value.fix
    assert "also=" in error.value.fix


def test_nothing_is_named_where_nothing_is_carried() -> None:
    model, step = made(guard={"max_consecutive": 2})
    with pytest.raises(TrainingStopped) as error:
        over(step, loss_of(model), [NAN] * 3)
    assert "also=" not in error.value.fix


# --- gradients inside the loss ---


def inner_step(step: hs.Step, model: nn.Linear, *, create_graph: bool) -> Callable[[Tensor], Tensor]:
    """One inner step of MAML: the loss of the weights after it."""

    def loss(x: Tensor) -> Tensor:
        weights = list(model.parameters())
        gradients = step.grad(F.mse_loss(model(x), x), weights, create_graph=create_graph)
        fast = [w - 0.1 * g for w, g in zip(weights, gradients, strict=True)]
        return F.mse_loss(F.linear(x, *fast), x)

    return loss


@pytest.mark.parametrize("create_graph", [True, False])
def test_an_inner_step_is_of_the_order_that_was_asked_for(create_graph: bool) -> None:
    model, step = made()
    twin, _ = made()
    weights = list(twin.parameters())
    optimizer = sgd(twin)
    for _ in range(3):
        step(inner_step(step, model, create_graph=create_graph), [X])
        gradients = torch.autograd.grad(F.mse_loss(twin(X), X), weights, create_graph=create_graph)
        fast = [w - 0.1 * g for w, g in zip(weights, gradients, strict=True)]
        optimizer.zero_grad()
        F.mse_loss(F.linear(X, *fast), X).backward()
        optimizer.step()
    assert torch.equal(model.weight, twin.weight)


def test_an_input_that_outputs_do_not_depend_on_has_no_gradient() -> None:
    model, step = made(precision=hs.Precision("fp16", simulate=True))
    unused = nn.Parameter(torch.zeros(3))
    seen: list[Any] = []

    def loss(x: Tensor) -> Tensor:
        value = F.mse_loss(model(x), x)
        seen.append(step.grad(value, [model.weight, unused], allow_unused=True))
        return value + 0 * seen[-1][0].sum()

    assert step(loss, [X]).committed
    assert seen[0][1] is None


def test_a_second_pass_of_sam_in_on_gradients_is_bit_equal_to_sam_by_hand_and_safe() -> None:
    def ascend(weights: list[Tensor]) -> list[Tensor]:
        before = [w.detach().clone() for w in weights]
        norm = torch.nn.utils.get_total_norm([w.grad for w in weights if w.grad is not None])
        with torch.no_grad():
            for w in weights:
                w.add_(w.grad * (0.05 / norm))
        return before

    def second_pass(model: nn.Module) -> None:
        weights = list(model.parameters())
        before = ascend(weights)
        with torch.enable_grad(), step.plan.forward():
            gradients = step.grad(loss_of(model)(now[0]), weights, create_graph=False)
        for w, old, gradient in zip(weights, before, gradients, strict=True):
            w.copy_(old)
            w.grad = gradient

    model, step = made(on_gradients=second_pass)
    twin, _ = made()
    optimizer, weights = sgd(twin), list(twin.parameters())
    now = [X]
    for k in range(3):
        now[0] = X + k
        step(loss_of(model), now)
        optimizer.zero_grad()
        loss_of(twin)(X + k).backward()
        before = ascend(weights)
        optimizer.zero_grad()
        loss_of(twin)(X + k).backward()
        for w, old in zip(weights, before, strict=True):
            w.data.copy_(old)
        optimizer.step()
    assert torch.equal(model.weight, twin.weight)
    now[0] = NAN
    assert not step(loss_of(model), now).committed
    assert torch.equal(model.weight, twin.weight)


# --- what torch says, and what people give ---


class OldStyle(nn.Module):
    """Meta-learners override these without torch's arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.vars = nn.ParameterList([nn.Parameter(torch.eye(4))])

    def parameters(self) -> nn.ParameterList:  # type: ignore[override]
        return self.vars

    def zero_grad(self, vars: object = None) -> None:  # type: ignore[override]
        raise AssertionError("not what it is called for")

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.vars[0])


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_model_that_overrides_parameters_without_torchs_arguments_trains(precision: str) -> None:
    model = OldStyle()
    step = hs.Step(model, sgd(model), hs.Precision(precision, simulate=precision != "fp32"))
    with hs.ledger(step):
        assert step(lambda x: model(x).square().mean(), [X]).committed


WRONG: dict[str, tuple[Callable[[nn.Module], tuple[Any, Any]], str]] = {
    "nothing": (lambda model: (None, None), "hs.Step(model, torch.optim"),
    "no optimizer": (lambda model: (model, [None]), "hs.Step(model, torch.optim"),
    "a tensor": (lambda model: (X, sgd(model)), "ParameterList"),
    "a trainer": (lambda model: (SimpleNamespace(model=model), sgd(model)), "the model and the optimizer inside it"),
    "a wrapper": (
        lambda model: (model, SimpleNamespace(optimizer=sgd(model))),
        "the model and the optimizer inside it",
    ),
    "several": (lambda model: ([model, model], sgd(model)), "ModuleList"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_model_or_optimizer_is_refused_with_the_form_to_use(name: str) -> None:
    given, fix = WRONG[name]
    with pytest.raises(ConfigError) as error:
        hs.Step(*given(nn.Linear(4, 4)), "fp32")
    assert fix in error.value.fix


def test_complex_weights_are_trained_without_a_warning_about_fused_kernels() -> None:
    model = nn.ParameterList([nn.Parameter(torch.ones(4, dtype=torch.cfloat))])
    step = hs.Step(model, torch.optim.Adam(model.parameters(), 0.1), "fp32", clip_norm=0.5, ema_decay=0.9)

    def loss(x: Tensor) -> Tensor:
        return (torch.fft.fft(x) * model[0]).abs().square().mean()

    assert step(loss, [X]).committed
    before = model[0].detach().clone()
    assert not step(loss, [NAN]).committed
    assert torch.equal(torch.view_as_real(model[0]), torch.view_as_real(before))


# --- networks that loss_fn writes and the step does not guard ---


def with_norm() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))


def step_of(model: nn.Module, **more: Any) -> hs.Step:
    return hs.Step(model, torch.optim.SGD(model.parameters(), 0.1, fused=True), "fp32", **more)


def test_a_network_left_out_of_also_is_warned_about_once_with_its_name() -> None:
    critic, generator = nn.Linear(4, 1), with_norm()
    step = step_of(critic)

    def loss_fn(x: Tensor) -> Tensor:
        return critic(generator(x).detach()).mean()

    with pytest.warns(UserWarning, match=r"BatchNorm1d '1' of Sequential.*also=\[generator\]") as caught:
        step(loss_fn, [X])
    assert caught[0].filename == __file__
    assert not modules_of_torch._global_forward_pre_hooks
    step(loss_fn, [X])  # a second warning would be an error


class Constant(nn.Module):
    """Has a buffer that nobody writes, as a positional encoding."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        return x - self.mean


def test_an_entry_of_a_dict_is_named_as_such() -> None:
    nets = {"critic": nn.Linear(4, 1), "slow": with_norm()}
    with pytest.warns(UserWarning, match=r"also=\[nets\['slow'\]\]"):
        step_of(nets["critic"])(lambda x: nets["critic"](nets["slow"](x)).mean(), [X])


def test_guarded_evaluated_and_unwritten_networks_are_left_in_peace() -> None:
    critic, guarded, evaluated, constant = nn.Linear(4, 1), with_norm(), with_norm().eval(), Constant()
    norm = nn.BatchNorm1d(4)
    step = step_of(critic, also=[guarded, *norm.buffers()])
    step(lambda x: critic(constant(evaluated(norm(guarded(x))))).mean(), [X])


@pytest.mark.parametrize("way", ["itself", "in a dict", "in a partial"])
def test_what_is_compiled_is_neither_hooked_nor_broken(way: str) -> None:
    critic, generator = nn.Linear(4, 1), with_norm()
    nets = {"slow": torch.compile(generator, backend="eager", fullgraph=True)}
    compiled = torch.compile(lambda x: critic(generator(x).detach()).mean(), backend="eager", fullgraph=True)
    loss_fns = {
        "itself": compiled,
        "in a dict": lambda x: critic(nets["slow"](x).detach()).mean(),
        "in a partial": functools.partial(compiled),
    }
    assert step_of(critic)(loss_fns[way], [X]).committed
    assert not modules_of_torch._global_forward_pre_hooks


def test_the_hook_goes_when_the_loss_raises() -> None:
    critic = nn.Linear(4, 1)
    with pytest.raises(ZeroDivisionError):
        step_of(critic)(lambda x: critic(x) / (1 // 0), [X])
    assert not modules_of_torch._global_forward_pre_hooks


class Distilling(nn.Module):
    """A trainer whose loss is a method."""

    def __init__(self) -> None:
        super().__init__()
        self.model, self.teacher = with_norm(), with_norm()

    def loss(self, x: Tensor) -> Tensor:
        return (self.model(x) - self.teacher(x)).square().mean()


def test_a_replay_knows_the_networks_that_a_loss_names_each_once_and_not_the_model() -> None:
    trainer, critic = Distilling(), with_norm()

    def loss_fn(x: Tensor) -> Tensor:
        return trainer.loss(x) + critic(x).mean()

    assert find_held_modules(trainer.loss, trainer.model) == {"self.teacher": trainer.teacher}
    assert find_held_modules(functools.partial(trainer.loss), trainer.model) == {"self.teacher": trainer.teacher}
    assert find_held_modules(loss_fn, trainer.model) == {"critic": critic, "trainer.teacher": trainer.teacher}


@pytest.mark.parametrize("is_early", [True, False])
def test_a_forward_pass_before_the_step_misses_its_precision_and_is_warned_about(is_early: bool) -> None:
    policy = nn.Linear(4, 1)
    step = hs.Step(policy, torch.optim.SGD(policy.parameters(), 0.1, fused=True), hs.Precision("bf16", simulate=True))
    with contextlib.nullcontext() if is_early else step.plan.forward():
        loss = policy(X).square().mean()
    expected = pytest.warns(UserWarning, match="no layer of the model.*computed in bf16.*step.plan.forward")
    with expected if is_early else contextlib.nullcontext():
        step(lambda _: loss, [None])


def test_layers_that_stay_in_fp32_inside_of_the_loss_are_no_early_forward_pass() -> None:
    table = nn.Embedding(4, 4)
    step = hs.Step(table, torch.optim.SGD(table.parameters(), 0.1, fused=True), hs.Precision("bf16", simulate=True))
    assert step(lambda ids: table(ids).square().mean(), [torch.arange(4)]).committed


def test_statistics_that_a_forward_pass_before_the_step_writes_are_warned_about() -> None:
    """A bad step restores what was there when it began, and the NaN was there already."""
    model = with_norm()
    step, loss = step_of(model), model(X).square().mean()
    with pytest.warns(UserWarning, match="what BatchNorm '1' wrote cannot be restored.*inside loss_fn"):
        step(lambda _: loss, [X])
    model.eval()
    step, loss = step_of(model), model(X).square().mean()
    step(lambda _: loss, [X])  # nothing was written
