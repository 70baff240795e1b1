"""Several networks in one loop: a step leaves alone what it does not train, on good steps and on bad ones."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

import halfstep as hs
from tiny_training import assert_same_bits
from written_models import good, spoiled, state_of

Loop = Callable[["Pair", Tensor, Tensor], list[bool]]


class Pair:
    """A generator and a discriminator, each with BatchNorm and a step that guards the other."""

    def __init__(self, precision: str = "fp32", **more: object) -> None:
        torch.manual_seed(0)
        self.generator, self.critic = (
            nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, outputs)) for outputs in (4, 1)
        )
        self.of_critic, self.of_generator = (
            hs.Step(
                net, torch.optim.Adam(net.parameters(), 1e-3, fused=True),
                hs.Precision(precision, simulate=precision != "fp32"), also=[other], **more,
            )
            for net, other in ((self.critic, self.generator), (self.generator, self.critic))
        )  # fmt: skip

    @property
    def state(self) -> dict[str, Tensor]:
        return state_of(self.generator, self.critic)


def with_kept_graph(pair: Pair, real: Tensor, noise: Tensor) -> list[bool]:
    """The generator runs once; its step goes back through the graph that the critic's step has built."""
    kept: dict[str, Tensor] = {}

    def of_critic(x: Tensor) -> Tensor:
        kept["fake"] = pair.generator(noise)
        return softplus(-pair.critic(x)).mean() + softplus(pair.critic(kept["fake"].detach())).mean()

    outcomes = [
        pair.of_critic(of_critic, [real]),
        pair.of_generator(lambda z: softplus(-pair.critic(kept["fake"])).mean(), [noise]),
    ]
    return [outcome.committed for outcome in outcomes]


def run_again(pair: Pair, real: Tensor, noise: Tensor) -> list[bool]:
    def of_critic(x: Tensor) -> Tensor:
        return softplus(-pair.critic(x)).mean() + softplus(pair.critic(pair.generator(noise).detach())).mean()

    outcomes = [
        pair.of_critic(of_critic, [real]),
        pair.of_generator(lambda z: softplus(-pair.critic(pair.generator(z))).mean(), [noise]),
    ]
    return [outcome.committed for outcome in outcomes]


def wasserstein(pair: Pair, real: Tensor, noise: Tensor) -> list[bool]:
    """Two steps of the critic, whose weights the loop clips, for one of the generator."""
    committed = []
    for _ in range(2):
        fake = pair.generator(noise)
        step = pair.of_critic(lambda x, fake=fake: pair.critic(fake).mean() - pair.critic(x).mean(), [real])
        committed.append(step.committed)
        with torch.no_grad():
            for weight in pair.critic.parameters():
                weight.clamp_(-0.1, 0.1)
    step = pair.of_generator(lambda z: -pair.critic(pair.generator(z)).mean(), [noise])
    return [*committed, step.committed]


@pytest.mark.parametrize("loop", [with_kept_graph, run_again])
def test_a_bad_batch_leaves_both_networks_of_a_gan_alone(loop: Loop) -> None:
    pair = Pair()
    for k in range(2):
        assert all(loop(pair, good(k), good(k + 10)))
    before = pair.state
    assert not any(loop(pair, good(2), spoiled()))
    assert_same_bits(before, pair.state)
    assert all(loop(pair, good(3), good(13)))


@pytest.mark.filterwarnings("ignore:loss_fn writes into the buffers")
@pytest.mark.parametrize("loop", [with_kept_graph, run_again, wasserstein])
def test_guarding_the_other_network_changes_no_bit_of_a_good_step(loop: Loop) -> None:
    guarded, plain = Pair(), Pair()
    for step in (plain.of_critic, plain.of_generator):
        step._step.writes.slots.roots = step._step.writes.slots.roots[:1]
    for k in range(3):
        assert loop(guarded, good(k), good(k + 10)) == loop(plain, good(k), good(k + 10))
    assert_same_bits(plain.state, guarded.state)


def test_a_gan_in_the_usual_loop_gives_the_same_bits() -> None:
    pair = Pair()
    critic, generator = copy.deepcopy(pair.critic), copy.deepcopy(pair.generator)
    of_critic, of_generator = (torch.optim.Adam(net.parameters(), 1e-3, fused=True) for net in (critic, generator))
    for k in range(3):
        real, noise = good(k), good(k + 10)
        with_kept_graph(pair, real, noise)
        of_critic.zero_grad()
        fake = generator(noise)
        (softplus(-critic(real)).mean() + softplus(critic(fake.detach())).mean()).backward()
        of_critic.step()
        of_generator.zero_grad()
        softplus(-critic(fake)).mean().backward()
        of_generator.step()
    assert_same_bits(state_of(generator, critic), pair.state)


def test_weights_clipped_between_steps_are_the_loops_own_business() -> None:
    pair = Pair()
    assert all(wasserstein(pair, good(0), good(10)))
    before = pair.state
    assert wasserstein(pair, good(1), spoiled()) == [False, False, False]
    statistics = [name for name in before if "running" in name and name.startswith("1")]
    assert statistics
    assert_same_bits({n: before[n] for n in statistics}, {n: pair.state[n] for n in statistics})
    assert all(value.isfinite().all() for name, value in pair.state.items() if name.startswith("1"))


def test_fp16_leaves_both_alone_when_a_scale_is_too_high() -> None:
    pair = Pair("fp16")
    before = pair.state
    kept: dict[str, Tensor] = {}

    def overflowing(x: Tensor) -> Tensor:
        kept["fake"] = pair.generator(x)
        return pair.critic(kept["fake"]).mean() * 1e4

    assert not pair.of_critic(overflowing, [good()]).committed
    assert_same_bits(before, pair.state)


def test_a_step_clears_no_gradient_of_a_network_that_it_only_guards() -> None:
    pair = Pair()
    pair.generator(good()).sum().backward()
    kept = [weight.grad for weight in pair.generator.parameters()]
    pair.of_critic(lambda x: pair.critic(x).square().mean(), [good()])
    assert all(weight.grad is gradient for weight, gradient in zip(pair.generator.parameters(), kept, strict=True))


def test_a_frozen_teacher_is_not_copied_but_its_statistics_are_guarded() -> None:
    student, teacher = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).requires_grad_(False)
    step = hs.Step(student, torch.optim.AdamW(student.parameters(), fused=True), "fp32", also=[teacher])
    loss_fn = lambda x: (student(x) - teacher(x)).square().mean()  # noqa: E731
    assert step(loss_fn, [good()]).committed
    before = state_of(student, teacher)
    assert not step(loss_fn, [spoiled()]).committed
    assert_same_bits(before, state_of(student, teacher))
    assert not step._step.writes.written
