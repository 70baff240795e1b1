"""What forward writes on a real GPU: put back inside a captured graph as outside of it, without a wait."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from halfstep.step import forward_writes
from halfstep.step.facts import Facts
from halfstep.step.graph import CaptureFailed, GraphedStep
from halfstep.step.optim.by_name import build_optimizer
from halfstep.step.randomness import choose_algorithms
from halfstep.step.step import GuardedStep
from halfstep_train.run.engine import UNCAPTURED
from no_waiting import no_host_wait
from tiny_training import assert_same_bits, plan
from written_models import WAYS, Clamped, Codebook, Late, Momentum, good, spoiled, state_of

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def repeatable() -> Any:
    with choose_algorithms(deterministic=True):
        yield


def window(x: Tensor) -> list[dict[str, Tensor]]:
    return [{"image": x.cuda()}]


def step_of(model: nn.Module, optimizer: str = "adamw", **more: Any) -> GuardedStep:
    built = build_optimizer(optimizer, [{"params": [p for p in model.parameters() if p.requires_grad]}], lr=1e-2)
    return GuardedStep(model, built, plan("fp32", "cuda"), **more)


def loss_of(model: nn.Module) -> Callable[[dict[str, Tensor]], Tensor]:
    return lambda b: model(b["image"])


def graphed(step: GuardedStep, loss_fn: Callable[[dict[str, Tensor]], Tensor]) -> Callable[..., Facts]:
    for k in range(UNCAPTURED):
        step(loss_fn, window(good(k)))
    return GraphedStep(step, loss_fn, window(good(9)), torch.cuda.graph_pool_handle())


@pytest.mark.parametrize("good_before", [0, 1, 3])
@pytest.mark.parametrize("way", WAYS)
def test_a_written_parameter_is_put_back_outside_of_a_graph(way: str, good_before: int) -> None:
    model = Codebook(way).cuda()
    step = step_of(model)
    for k in range(good_before):
        step(loss_of(model), window(good(k)))
    for _ in range(2):
        before = state_of(model)
        assert step(loss_of(model), window(spoiled())).read().is_bad
        assert_same_bits(before, state_of(model))
    assert not step(loss_of(model), window(good(5))).read().is_bad


CAPTURED = {
    "codebook": lambda: Codebook("in place"),
    "codebook through data": lambda: Codebook("through data"),
    "clamped": lambda: Clamped(through_data=True),
    "late buffer": lambda: Late("buffer"),
    "late module": lambda: Late("module"),
}


@pytest.mark.parametrize("optimizer", ["adamw", "rmsprop"])
@pytest.mark.parametrize("kind", sorted(CAPTURED))
def test_inside_a_graph_it_is_put_back_too_and_good_steps_are_those_of_an_eager_run(kind: str, optimizer: str) -> None:
    torch.manual_seed(0)
    model = CAPTURED[kind]().cuda()
    torch.manual_seed(0)
    twin = CAPTURED[kind]().cuda()
    eager = step_of(twin, optimizer)
    graph = graphed(step_of(model, optimizer), loss_of(model))
    for k in range(UNCAPTURED):
        eager(loss_of(twin), window(good(k)))
    for k in (20, 21):
        graph(window(good(k)))
        eager(loss_of(twin), window(good(k)))
        before = state_of(model)
        for _ in range(2):
            assert graph(window(spoiled())).read().is_bad
            assert_same_bits(before, state_of(model))
    assert_same_bits(state_of(twin), state_of(model))


@pytest.mark.parametrize("way", ["replaced", "other storage"])
def test_a_model_that_exchanges_its_tensors_is_not_captured(way: str) -> None:
    model = Codebook(way).cuda()
    step = step_of(model)
    with pytest.raises(CaptureFailed, match="replaces or registers"):
        graphed(step, loss_of(model))
    before = state_of(model)
    assert step(loss_of(model), window(spoiled())).read().is_bad
    assert_same_bits(before, state_of(model))


def test_a_large_parameter_that_is_first_written_while_capturing_is_told_and_not_captured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(forward_writes, "SMALL_BYTES", 0)
    model = Codebook("in place").cuda()
    model.start = UNCAPTURED
    step = step_of(model)
    with pytest.raises(CaptureFailed, match="wrote code for the first time"):
        graphed(step, loss_of(model))
    assert not step(loss_of(model), window(good(4))).read().is_bad
    before = state_of(model)
    assert step(loss_of(model), window(spoiled())).read().is_bad
    assert_same_bits(before, state_of(model))


def test_another_network_is_guarded_inside_a_graph() -> None:
    student, teacher = nn.Linear(4, 4).cuda(), nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).cuda()
    teacher.requires_grad_(False)
    step = step_of(student, also=[teacher])
    graph = graphed(step, lambda b: (student(b["image"]) - teacher(b["image"])).square().mean())
    graph(window(good(20)))
    before = state_of(student, teacher)
    assert graph(window(spoiled())).read().is_bad
    assert_same_bits(before, state_of(student, teacher))


def test_the_hook_on_gradients_is_captured_with_the_step() -> None:
    def halve(model: nn.Module) -> None:
        for weight in model.parameters():
            if weight.grad is not None:
                weight.grad.mul_(0.5)

    torch.manual_seed(0)
    model = nn.Linear(4, 4).cuda()
    step = step_of(model, on_gradients=halve)
    loss_fn = lambda b: model(b["image"]).square().mean()  # noqa: E731
    graph = graphed(step, loss_fn)
    weights = state_of(model)
    captured = graph(window(good(20))).read().grad_norm
    model.load_state_dict({name.removeprefix("0."): value for name, value in weights.items()})
    assert step(loss_fn, window(good(20))).read().grad_norm == captured


@pytest.mark.parametrize("keeps_graph", [True, False])
def test_a_gan_makes_no_waits_and_a_bad_batch_leaves_both_networks_alone(keeps_graph: bool) -> None:
    torch.manual_seed(0)
    made = [nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, n)).cuda() for n in (4, 1)]
    generator, critic = made
    of_generator, of_critic = step_of(generator, also=[critic]), step_of(critic, also=[generator])
    kept: dict[str, Tensor] = {}

    def loop(real: Tensor, noise: Tensor) -> list[Facts]:
        def critics_loss(x: Tensor) -> Tensor:
            kept["fake"] = generator(noise)
            return softplus(-critic(x)).mean() + softplus(critic(kept["fake"].detach())).mean()

        def generators_loss(z: Tensor) -> Tensor:
            return softplus(-critic(kept["fake"] if keeps_graph else generator(z))).mean()

        return [of_critic(critics_loss, [real]), of_generator(generators_loss, [noise])]

    batches = [good(k, device="cuda") for k in range(8)]
    bad = spoiled(device="cuda")
    for k in range(3):
        assert not any(facts.read().is_bad for facts in loop(batches[k], batches[k + 4]))
    with no_host_wait():
        for k in range(3):
            loop(batches[k], batches[k + 4])
    before = state_of(generator, critic)
    with no_host_wait():
        facts = loop(batches[0], bad)
    assert all(one.read().is_bad for one in facts)
    assert_same_bits(before, state_of(generator, critic))


def test_a_codebook_and_a_momentum_encoder_make_no_waits_after_their_first_window() -> None:
    for model in (Codebook("in place").cuda(), Codebook("replaced").cuda(), Momentum().cuda()):
        step = step_of(model)
        batches = [window(good(k)) for k in range(4)]
        for k in range(2):
            step(loss_of(model), batches[k])
        with no_host_wait():
            for k in range(4):
                step(loss_of(model), batches[k])
