"""Schedules that cycle momentum or betas: never frozen, neither eagerly nor in captured steps.

On the CPU, with a stand-in for replays. Parameters that claim to be on a GPU get the form that captured steps need."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import halfstep as hs
from halfstep.step.optim.cycled_adam import step_cycled_adam
from replay_stand_in import replays_on_cpu

TORCH = torch.optim.lr_scheduler
NUM_STEPS, BAD = 14, 9


class OnGpu(nn.Parameter):
    is_cuda = True  # type: ignore[assignment]


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "one cycle": lambda o: TORCH.OneCycleLR(o, 0.1, NUM_STEPS),
    "cycles": lambda o: TORCH.CyclicLR(o, 0.01, 0.1, 4),
    "inside another": lambda o: TORCH.ChainedScheduler([TORCH.OneCycleLR(o, 0.1, NUM_STEPS)]),
}
OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "Adam": (torch.optim.Adam, {"amsgrad": True, "weight_decay": 0.1}),
    "AdamW, fused": (torch.optim.AdamW, {"fused": True, "maximize": True}),
    "SGD": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "SGD, fused": (torch.optim.SGD, {"momentum": 0.9, "fused": True}),
    "RMSprop": (torch.optim.RMSprop, {"momentum": 0.9}),
}


def make(optimizer: str, scheduler: str, *, on_gpu: bool = False) -> tuple[nn.Module, Any, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    if on_gpu:
        for layer in (model[0], model[2]):
            layer.weight, layer.bias = OnGpu(layer.weight.data), OnGpu(layer.bias.data)
    kind, settings = OPTIMIZERS[optimizer]
    made = kind([{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 0.02}], 0.01, **settings)
    return model, made, SCHEDULERS[scheduler](made)


def list_batches() -> list[torch.Tensor]:
    torch.manual_seed(1)
    batches = [torch.randn(5, 3) for _ in range(NUM_STEPS)]
    batches[BAD] = torch.full((5, 3), float("nan"))
    return batches


def read_momenta(optimizer: torch.optim.Optimizer) -> list[float]:
    return [float(g["betas"][0] if "betas" in g else g["momentum"]) for g in optimizer.param_groups]


def train_plain(optimizer: str, scheduler: str) -> tuple[nn.Module, list[list[float]]]:
    model, made, paced = make(optimizer, scheduler)
    momenta = []
    for number, x in enumerate(list_batches()):
        if number == BAD:
            continue
        made.zero_grad()
        model(x).square().mean().backward()
        made.step()
        momenta.append(read_momenta(made))
        paced.step()
    return model, momenta


def train_guarded(
    optimizer: str, scheduler: str, fast: Any, *, on_gpu: bool = False
) -> tuple[nn.Module, list[list[float]], hs.Step, torch.optim.Optimizer]:
    model, made, paced = make(optimizer, scheduler, on_gpu=on_gpu)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        step = hs.Step(model, made, "fp32", schedule=hs.per_step(paced), fast=fast)
        momenta = []
        for x in list_batches():
            if step(lambda x: model(x).square().mean(), [x]).committed:
                momenta.append(read_momenta(made))
    return model, momenta, step, made


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_eager_steps_have_the_bits_of_a_plain_loop(scheduler: str, optimizer: str) -> None:
    plain, expected = train_plain(optimizer, scheduler)
    model, momenta, _, _ = train_guarded(optimizer, scheduler, "off")
    assert momenta == expected
    assert len({tuple(own) for own in momenta}) > 3
    assert torch.equal(model[0].weight, plain[0].weight)


@pytest.mark.parametrize("optimizer", ["SGD", "SGD, fused", "RMSprop"])
def test_momentum_of_the_host_is_committed_eagerly_with_one_line(
    optimizer: str, capfd: pytest.CaptureFixture[str]
) -> None:
    plain, expected = train_plain(optimizer, "one cycle")
    with replays_on_cpu():
        model, momenta, step, _ = train_guarded(optimizer, "one cycle", "graph")
    assert step.mode == "graph, commit eager"
    assert momenta == expected
    assert torch.equal(model[0].weight, plain[0].weight)
    said = capfd.readouterr().err
    assert said.count("cycles the momentum") == 1
    assert optimizer.partition(",")[0] in said


@pytest.mark.parametrize(
    ("optimizer", "scheduler"), [("Adam", "one cycle"), ("AdamW, fused", "cycles"), ("Adam", "inside another")]
)
def test_captured_adam_reads_its_betas_from_the_table(optimizer: str, scheduler: str) -> None:
    plain, expected = train_plain(optimizer, scheduler)
    with replays_on_cpu():
        model, momenta, step, made = train_guarded(optimizer, scheduler, "graph", on_gpu=True)
    assert step.mode == "graph"
    assert momenta == expected
    assert all(isinstance(group["betas"][0], torch.Tensor) for group in made.param_groups)
    torch.testing.assert_close(model[0].weight.data, plain[0].weight.data, rtol=1e-4, atol=1e-6)
    assert f"{optimizer.partition(',')[0]} in the form for graphs" in str(step.certificate)
    state = made.state_dict()
    assert all(isinstance(beta, float) for group in state["param_groups"] for beta in group["betas"])
    step.load_state_dict(step.state_dict())
    assert all(isinstance(group["betas"][0], torch.Tensor) for group in made.param_groups)


@pytest.mark.parametrize("settings", [{}, {"amsgrad": True}, {"maximize": True}, {"weight_decay": 0.1}])
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_a_step_with_a_beta_on_the_device_is_that_of_torch(kind: Any, settings: dict[str, Any]) -> None:
    torch.manual_seed(0)
    ours = [nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(2, 2)), nn.Parameter(torch.randn(1))]
    theirs = copy.deepcopy(ours)
    one, other = kind(ours, 0.01, **settings), kind(theirs, 0.01, **settings)
    for number in range(6):
        beta = 0.8 + number / 50
        for pair in zip(ours[: 2 + number % 2], theirs[: 2 + number % 2], strict=True):
            pair[0].grad = torch.randn_like(pair[0])
            pair[1].grad = pair[0].grad.clone()
        one.param_groups[0]["betas"] = (torch.tensor(beta), 0.999)
        other.param_groups[0]["betas"] = (beta, 0.999)
        with torch.no_grad():
            step_cycled_adam(one)
        other.step()
    for pair in zip(ours, theirs, strict=True):
        torch.testing.assert_close(*pair, rtol=1e-5, atol=1e-6)


def test_one_group_may_be_cycled_and_another_optimizer_not() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    cycled = torch.optim.SGD(model[0].parameters(), 0.1, momentum=0.9)
    other = torch.optim.SGD(model[1].parameters(), 0.1, momentum=0.7)
    schedule = [hs.per_step(TORCH.OneCycleLR(cycled, 0.1, 9)), hs.per_epoch(TORCH.StepLR(other, 1, 0.5))]
    step = hs.Step(model, [cycled, other], "fp32", schedule=schedule)
    for _ in range(4):
        step(lambda x: model(x).square().mean(), [torch.randn(5, 3)])
        step.epoch_ended()
    assert read_momenta(other) == [0.7]
    assert read_momenta(cycled) != [0.95]
    assert float(other.param_groups[0]["lr"]) == pytest.approx(0.1 / 16)
