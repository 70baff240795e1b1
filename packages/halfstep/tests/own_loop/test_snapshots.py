"""Snapshots: a rollback always finds a way back, however often, and however many steps were skipped."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from halfstep.step.snapshots import Snapshots
from tiny_training import TinyNet, assert_same_bits, batch, everything, loss_of, make_step


def advance(snapshots: Snapshots, step, num: int, *, bad: bool = False) -> None:  # type: ignore[no-untyped-def]
    for _ in range(num):
        taken = batch(step.attempted)
        if bad:
            taken["image"][0] = float("nan")
        step(loss_of(step.model), [taken])
        if snapshots.is_due(step.attempted):
            snapshots.take(step.model, step)


def kept(snapshots: Snapshots) -> list[int]:
    return [state["step"]["committed"] for state in snapshots.states]


def test_the_ring_reaches_back_past_the_margin_and_no_further() -> None:
    step, snapshots = make_step(), Snapshots(every=4, margin=6)
    snapshots.take(step.model, step)
    advance(snapshots, step, 40)
    assert kept(snapshots) == [32, 36, 40]
    assert snapshots.find_before(40)["step"]["committed"] == 32


def test_skipped_steps_do_not_empty_the_ring() -> None:
    step, snapshots = make_step(), Snapshots(every=4, margin=6)
    snapshots.take(step.model, step)
    advance(snapshots, step, 12)
    for _ in range(6):
        advance(snapshots, step, 1)
        advance(snapshots, step, 7, bad=True)
    found = snapshots.find_before(int(step.committed))
    assert found["step"]["committed"] <= int(step.committed) - 6


def test_a_state_gone_back_to_is_far_enough_the_next_time() -> None:
    step, snapshots = make_step(), Snapshots(every=4, margin=6)
    snapshots.take(step.model, step)
    advance(snapshots, step, 16)
    first = snapshots.find_before(16)
    snapshots.go_back(first, step.model, step)
    before = everything(step)
    assert (int(step.committed), step.attempted) == (8, 16)
    for _ in range(3):
        advance(snapshots, step, 2)
        again = snapshots.find_before(int(step.committed))
        assert again is first
        snapshots.go_back(again, step.model, step)
        assert_same_bits(before, everything(step))


def test_where_snapshots_begin_in_mid_run_the_first_is_a_way_back() -> None:
    step, snapshots = make_step(), Snapshots(every=4, margin=6)
    for k in range(5):
        step(loss_of(step.model), [batch(k)])
    snapshots.take(step.model, step)
    assert snapshots.find_before(6) is snapshots.states[0]
    assert snapshots.find_before(4) is None


def test_what_is_stored_is_all_of_it() -> None:
    step, snapshots, other = make_step(), Snapshots(every=4, margin=6), Snapshots(every=4, margin=6)
    snapshots.take(step.model, step)
    advance(snapshots, step, 16)
    snapshots.go_back(snapshots.find_before(16), step.model, step)
    other.load_state_dict(snapshots.state_dict())
    assert other.find_before(9) is snapshots.find_before(9)


class Counting(TinyNet):
    """Counts its forward passes in a buffer that state_dict leaves out; a cache and a stored buffer grow."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()), persistent=False)
        self.register_buffer("cache", torch.zeros(1), persistent=False)
        self.register_buffer("stored", torch.zeros(0))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add_(1)
        self.cache = torch.arange(float(self.seen) + 1)
        self.stored = torch.cat([self.stored, self.seen[None]])
        return super().forward(x)


def test_buffers_that_grow_or_that_state_dict_leaves_out_go_back_too() -> None:
    from halfstep.step.step import GuardedStep
    from tiny_training import plan

    model: nn.Module = Counting()
    step = GuardedStep(model, torch.optim.SGD(model.parameters(), lr=0.1, fused=True), plan())
    snapshots = Snapshots(every=1, margin=0)
    advance(snapshots, step, 2)
    state = snapshots.states[-1]
    step(loss_of(model), [batch(9)])
    step(loss_of(model), [batch(9)])
    snapshots.go_back(state, model, step)
    assert float(model.seen) == 2
    assert model.cache.tolist() == [0, 1, 2]
    assert model.stored.tolist() == [1, 2]


def test_a_snapshot_does_not_move_with_the_average_it_was_taken_of() -> None:
    step, snapshots = make_step(), Snapshots(every=4, margin=6)
    advance(snapshots, step, 1)
    snapshots.take(step.model, step)
    taken = {name: value.clone() for name, value in snapshots.states[-1]["step"]["ema"].items()}
    advance(snapshots, step, 2)
    assert_same_bits(taken, snapshots.states[-1]["step"]["ema"])
    assert any(not torch.equal(taken[name], now) for name, now in step.state_dict()["ema"].items())
