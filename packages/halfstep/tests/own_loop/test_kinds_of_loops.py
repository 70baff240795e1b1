"""Kinds of training loops as public repositories write them: with hs.Step in fp32 they keep every bit on a CPU."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import halfstep as hs
from kinds_of_loops import KINDS, NUM_STEPS, Kind

pytestmark = pytest.mark.filterwarnings("ignore:.*left by `break`", "ignore:.*holds no position in the data")


def read_bits(loop: Kind) -> list[Tensor]:
    """Return copies of all weights, buffers and optimizer state."""
    held = [value for model in loop.models for value in model.state_dict().values()]
    optimizers = [optimizer for step in loop.steps for optimizer in step.optimizers]
    held += [value for optimizer in optimizers for state in optimizer.state.values() for value in state.values()]
    return [value.clone() for value in held if isinstance(value, Tensor)]


def are_equal(ones: list[Tensor], others: list[Tensor]) -> bool:
    return len(ones) == len(others) and all(map(torch.equal, ones, others))


def run(steps: Any, num: int) -> None:
    for _ in itertools.islice(steps, num):
        pass


@pytest.mark.parametrize("name", KINDS)
def test_a_loop_with_the_step_keeps_every_bit_of_the_plain_loop(name: str) -> None:
    plain = KINDS[name]()
    run(plain.plain(), NUM_STEPS)
    guarded = KINDS[name]()
    run(guarded.guarded(), NUM_STEPS)
    for model, other in zip(plain.models, guarded.models, strict=True):
        assert are_equal([*model.state_dict().values()], [*other.state_dict().values()])


class Planted:
    """A step whose call number 6 meets a NaN, and compares everything before and after it."""

    def __init__(self, step: hs.Step, place: str, loop: Callable[[], Kind]) -> None:
        self.step, self.place, self.loop = step, place, loop
        self.unchanged: bool | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.step, name)

    def __call__(self, loss_fn: Callable[[Any], Tensor], window: list[Any]) -> Any:
        if self.step.attempted != 6:
            return self.step(loss_fn, window)
        before, wrong = read_bits(self.loop()), loss_fn
        handle = None
        if self.place == "batch" and window != [None]:
            window = [poison(batch) for batch in window]
        elif self.place == "gradient":
            weight = list(self.step.model.parameters())[-1]
            handle = weight.register_hook(lambda gradient: gradient * float("nan"))
        else:
            wrong = lambda batch: loss_fn(batch) + float("nan")  # noqa: E731
        outcome = self.step(wrong, window)
        if handle is not None:
            handle.remove()
        assert not outcome.committed
        self.unchanged = are_equal(before, read_bits(self.loop()))
        return outcome


def poison(batch: Any) -> Any:
    if isinstance(batch, list):
        return [poison(batch[0]), *batch[1:]]
    return batch.clone().index_fill_(0, torch.tensor(0), float("nan"))


@pytest.mark.filterwarnings("ignore:step 6 was dropped", "ignore:1 of the")
@pytest.mark.parametrize("place", ["batch", "loss", "gradient"])
@pytest.mark.parametrize("name", KINDS)
def test_a_planted_nan_changes_no_bit(name: str, place: str) -> None:
    planted: list[Planted] = []

    def watch(step: hs.Step) -> Planted:
        planted.append(Planted(step, place, lambda: loop))
        return planted[-1]

    loop = KINDS[name](watch)
    run(loop.guarded(), 10)
    assert [one.unchanged for one in planted] == [True] * len(loop.steps)
    assert all(bool(torch.isfinite(value).all()) for value in read_bits(loop) if value.is_floating_point())


@pytest.mark.parametrize("name", KINDS)
def test_a_resumed_loop_keeps_every_bit(tmp_path: Path, name: str) -> None:
    path = tmp_path / "state"

    def make(*, resumes: bool = False) -> tuple[Kind, Any]:
        """Return a loop and its steps; the state is loaded as soon as the loop has made its hs.Steps."""
        made: list[hs.Step] = []

        def watch(step: hs.Step) -> hs.Step:
            made.append(step)
            if resumes and len(made) == len(stored.steps):
                hs.load(path, made, loop.models)
            return step

        loop = KINDS[name](watch)
        return loop, loop.guarded()

    whole, steps = make()
    run(steps, 30)
    stored, steps = make()
    run(steps, 13)
    hs.save(path, stored.steps, stored.models)
    steps.close()
    resumed, steps = make(resumes=True)
    run(steps, 17)
    assert are_equal(read_bits(whole), read_bits(resumed))


def test_clipping_sums_the_norm_in_the_order_of_the_model_whatever_the_groups() -> None:
    """GPT scripts sort weights into groups with and without decay; clip_grad_norm_ takes model.parameters()."""

    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(16, 16), nn.LayerNorm(16), nn.GELU())))
        named = list(model.named_parameters())
        groups = [[p for n, p in named if p.ndim > 1], [p for n, p in reversed(named) if p.ndim == 1]]
        return model, torch.optim.AdamW(
            [{"params": groups[0]}, {"params": groups[1], "weight_decay": 0.0}], 1e-2, fused=True
        )

    data = torch.randn(30, 8, 16, generator=torch.Generator().manual_seed(1))
    plain, optimizer = make()
    for x in data:
        optimizer.zero_grad()
        F.mse_loss(plain(x), x).backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        optimizer.step()
    model, optimizer = make()
    step = hs.Step(model, optimizer, "fp32", clip_norm=0.1)
    for x in data:
        step(lambda x: F.mse_loss(model(x), x), [x])
    assert all(map(torch.equal, plain.parameters(), model.parameters()))
