"""Loops of different kinds, each as a plain torch loop and with hs.Step: they train the same weights, bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import halfstep as hs

NUM_STEPS = 50


def rand(*shape: int) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(0))


class Kind:
    """A script: `plain` is its loop, `guarded` the same with hs.Step. Both yield after each optimizer step."""

    def __init__(self, watch: Callable[[hs.Step], Any] = lambda step: step) -> None:
        torch.manual_seed(1)
        self.watch = watch  # lets a test stand between the loop and its steps
        self.optimizer: torch.optim.Optimizer
        self.steps: list[hs.Step] = []
        self.models: list[nn.Module] = []
        self.build()

    def build(self) -> None: ...
    def get_loss(self) -> Tensor: ...  # type: ignore[empty-body]

    def plain(self) -> Iterator[None]:
        while True:
            loss = self.get_loss()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            yield

    def guarded(self) -> Iterator[None]: ...  # type: ignore[empty-body]

    def train(self, model: nn.Module) -> nn.Module:
        self.models.append(model)
        return model

    def guard(self, model: nn.Module, optimizer: torch.optim.Optimizer, **settings: Any) -> Any:
        self.steps.append(hs.Step(model, optimizer, "fp32", fast="off", **settings))
        return self.watch(self.steps[-1])


class Classifier(Kind):
    """Epochs with a shorter last batch, BatchNorm, dropout, momentum, and a scheduler stepped per epoch."""

    def build(self) -> None:
        net = nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(), nn.Linear(144, 3)
        )
        self.net = self.train(net)
        self.optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9, weight_decay=5e-4, fused=True)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 200)
        self.loader = DataLoader(TensorDataset(rand(30, 1, 8, 8), torch.arange(30) % 3), 8, shuffle=True)

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def plain(self) -> Iterator[None]:
        while True:
            for batch in self.loader:
                self.optimizer.zero_grad()
                self.loss(batch).backward()
                self.optimizer.step()
                yield
            self.scheduler.step()

    def guarded(self) -> Iterator[None]:
        step = self.guard(self.net, self.optimizer, schedule=hs.per_epoch(self.scheduler))
        while True:
            for window in step.windows(self.loader):
                step(self.loss, window)
                yield
            step.epoch_ended()


class Gan(Kind):
    """Two networks; the generator's loss reuses the fakes, with their graph, that the critic's step made."""

    def build(self) -> None:
        self.critic = self.train(
            nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
        )
        self.maker = self.train(nn.Sequential(nn.Linear(3, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 6)))
        self.optimizers = [torch.optim.Adam(m.parameters(), 1e-3, betas=(0.5, 0.999), fused=True) for m in self.models]
        self.loader = DataLoader(rand(32, 6), 8, shuffle=True)  # type: ignore[arg-type]

    def critic_loss(self, real: Tensor) -> Tensor:
        self.fake = self.maker(torch.randn(len(real), 3))
        return F.softplus(-self.critic(real)).mean() + F.softplus(self.critic(self.fake.detach())).mean()

    def maker_loss(self, _: object) -> Tensor:
        return F.softplus(-self.critic(self.fake)).mean()

    def plain(self) -> Iterator[None]:
        while True:
            for real in self.loader:
                for model, optimizer, loss in zip(
                    self.models, self.optimizers, (self.critic_loss, self.maker_loss), strict=True
                ):
                    model.zero_grad()
                    loss(real).backward()
                    optimizer.step()
                yield

    def guarded(self) -> Iterator[None]:
        critic = self.guard(self.critic, self.optimizers[0], also=[self.maker])
        maker = self.guard(self.maker, self.optimizers[1], also=[self.critic])
        while True:
            for window in critic.windows(self.loader):
                critic(self.critic_loss, window)
                maker(self.maker_loss, [None])
                yield


class Recurrent(Kind):
    """Truncated backpropagation with a state from batch to batch, clipping, and an update written by hand."""

    def build(self) -> None:
        self.net = self.train(nn.LSTM(4, 4, 2))
        self.memory = self.train(nn.Module())
        self.memory.register_buffer("h", torch.zeros(2, 5, 4))
        self.memory.register_buffer("c", torch.zeros(2, 5, 4))
        self.batches = list(rand(12, 7, 5, 4))

    def loss(self, x: Tensor) -> Tensor:
        out, (h, c) = self.net(x, (self.memory.h, self.memory.c))
        self.memory.h, self.memory.c = h.detach(), c.detach()
        return (out - x).square().mean()

    def plain(self) -> Iterator[None]:
        while True:
            for x in self.batches:
                self.net.zero_grad()
                self.loss(x).backward()
                torch.nn.utils.clip_grad_norm_(self.net.parameters(), 0.02)
                for p in self.net.parameters():
                    assert p.grad is not None
                    p.data.add_(p.grad, alpha=-2.0)
                yield

    def guarded(self) -> Iterator[None]:
        optimizer = torch.optim.SGD(self.net.parameters(), 2.0, fused=True)
        step = self.guard(self.net, optimizer, clip_norm=0.02, also=[self.memory])
        while True:
            for window in step.windows(self.batches):
                step(self.loss, window)
                yield


class Physics(Kind):
    """Second derivatives inside the loss, and no loader: the same points in every step."""

    def build(self) -> None:
        self.net = self.train(nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)))
        self.optimizer = torch.optim.Adam(self.net.parameters(), 1e-2, fused=True)
        self.x, self.t = (rand(20, 2)[:, k : k + 1].double().requires_grad_().float() for k in (0, 1))
        self.start = torch.sin(3 * self.x.detach())

    def loss(self, start: Tensor) -> Tensor:
        u = self.net(torch.cat([self.x, self.t], 1))
        u_x, u_t = torch.autograd.grad(u, (self.x, self.t), torch.ones_like(u), create_graph=True)
        (u_xx,) = torch.autograd.grad(u_x, self.x, torch.ones_like(u), create_graph=True)
        begin = self.net(torch.cat([self.x, torch.zeros_like(self.t)], 1))
        return (u_t + u * u_x - 0.01 * u_xx).square().mean() + (begin - start).square().mean()

    def get_loss(self) -> Tensor:
        return self.loss(self.start)

    def guarded(self) -> Iterator[None]:
        step = self.guard(self.net, self.optimizer)
        while True:
            step(self.loss, [self.start])
            yield


class Rollouts(Kind):
    """Actor and critic: the loss is made of outputs that were collected before the step."""

    def build(self) -> None:
        self.net = self.train(nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 3)))
        self.optimizer = torch.optim.Adam(self.net.parameters(), 1e-2, fused=True)

    def get_loss(self) -> Tensor:
        state, losses = torch.zeros(3), []
        for _ in range(6):
            out = self.net(state)
            action = torch.distributions.Categorical(logits=out[:2].detach()).sample()
            state = state.roll(1) + (action - 0.5) * 0.3
            reward = -state.square().sum()
            losses.append((reward - out[2]).square() - out[:2].log_softmax(0)[action] * (reward - out[2]).detach())
        return torch.stack(losses).sum()

    def guarded(self) -> Iterator[None]:
        step = self.guard(self.net, self.optimizer)
        while True:
            with step.plan.forward():
                loss = self.get_loss()
            step(lambda _, loss=loss: loss, [None])
            yield


class Denoiser(Kind):
    """Steps instead of epochs, two micro-batches each, noise drawn in the model, clipping, and an average by hand."""

    def build(self) -> None:
        self.net = self.train(nn.Sequential(nn.Linear(6, 12), nn.SiLU(), nn.Linear(12, 6)))
        self.average = self.train(copy.deepcopy(self.net))
        self.optimizer = torch.optim.Adam(self.net.parameters(), 1e-2, betas=(0.9, 0.99), fused=True)
        self.loader = DataLoader(rand(32, 6), 4, shuffle=True)  # type: ignore[arg-type]

    def loss(self, x: Tensor) -> Tensor:
        amount = torch.rand(len(x), 1)
        noise = torch.randn_like(x)
        return F.mse_loss(self.net(x + amount * noise), noise)

    @torch.no_grad()
    def update_average(self) -> None:
        for own, weight in zip(self.average.parameters(), self.net.parameters(), strict=True):
            own.lerp_(weight, 0.1)

    def plain(self) -> Iterator[None]:
        def cycle() -> Iterator[Tensor]:
            while True:
                yield from self.loader

        batches = cycle()
        while True:
            for _ in range(2):
                (self.loss(next(batches)) / 2).backward()
            torch.nn.utils.clip_grad_norm_(self.net.parameters(), 0.1)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.update_average()
            yield

    def guarded(self) -> Iterator[None]:
        step = self.guard(self.net, self.optimizer, clip_norm=0.1, accumulate=2)
        while True:
            for window in step.windows(self.loader):
                step(self.loss, window)
                self.update_average()
                yield


KINDS: dict[str, type[Kind]] = {
    "classifier": Classifier,
    "GAN": Gan,
    "recurrent": Recurrent,
    "physics": Physics,
    "rollouts": Rollouts,
    "denoiser": Denoiser,
}
