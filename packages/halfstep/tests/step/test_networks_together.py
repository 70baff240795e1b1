"""Several networks in one loop: a step leaves alone what it does not train, on good steps and on bad ones."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import halfstep as hs
from tiny_training import assert_same_bits
from written_models import good, spoiled, state_of


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
