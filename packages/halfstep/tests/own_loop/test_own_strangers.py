"""A network that `loss_fn` writes into and the step does not guard is noticed in the first window."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as modules_of_torch

import halfstep as hs
from halfstep.own_loop.evidence import find_held_modules

X = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))


def with_norm() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))


def made(model: nn.Module, **more: Any) -> hs.Step:
    return hs.Step(model, torch.optim.SGD(model.parameters(), 0.1, fused=True), "fp32", **more)


def test_a_network_left_out_of_also_is_warned_about_once_with_its_name() -> None:
    critic, generator = nn.Linear(4, 1), with_norm()
    step = made(critic)

    def loss_fn(x: Tensor) -> Tensor:
        return critic(generator(x).detach()).mean()

    with pytest.warns(UserWarning, match=r"BatchNorm1d '1' of Sequential.*also=\[generator\]") as caught:
        step(loss_fn, [X])
    assert caught[0].filename == __file__
    assert not modules_of_torch._global_forward_pre_hooks
    step(loss_fn, [X])  # a second warning would be an error


def test_an_attribute_of_the_trainer_is_named_as_such() -> None:
    class Trainer:
        def __init__(self) -> None:
            self.critic, self.slow = nn.Linear(4, 1), with_norm()

        def loss(self, x: Tensor) -> Tensor:
            return self.critic(self.slow(x).detach()).mean()

    trainer = Trainer()
    with pytest.warns(UserWarning, match=r"also=\[self\.slow\]"):
        made(trainer.critic)(trainer.loss, [X])
    with pytest.warns(UserWarning, match=r"also=\[trainer\.slow\]"):
        made(trainer.critic)(lambda x: trainer.loss(x), [X])


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
        made(nets["critic"])(lambda x: nets["critic"](nets["slow"](x)).mean(), [X])


def test_guarded_evaluated_and_unwritten_networks_are_left_in_peace() -> None:
    critic, guarded, evaluated, constant = nn.Linear(4, 1), with_norm(), with_norm().eval(), Constant()
    norm = nn.BatchNorm1d(4)
    step = made(critic, also=[guarded, *norm.buffers()])
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
    assert made(critic)(loss_fns[way], [X]).committed
    assert not modules_of_torch._global_forward_pre_hooks


def test_the_hook_goes_when_the_loss_raises() -> None:
    critic = nn.Linear(4, 1)
    with pytest.raises(ZeroDivisionError):
        made(critic)(lambda x: critic(x) / (1 // 0), [X])
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
    step, loss = made(model), model(X).square().mean()
    with pytest.warns(UserWarning, match="cannot restore the statistics of BatchNorm '1'.*inside loss_fn"):
        step(lambda _: loss, [X])
    model.eval()
    step, loss = made(model), model(X).square().mean()
    step(lambda _: loss, [X])  # nothing was written
