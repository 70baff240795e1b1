"""An eager step adds a fixed number of operations to a plain loop: none per parameter, buffer or module."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import nn

from halfstep.step.commit import Committer, commit_all
from halfstep.step.guard import MOST_UNREAD, SpikeMeter
from operations import count_extra_operations, make_mlp, make_normed
from tiny_training import assert_same_bits, batch, loss_of, make_step

X, Y = torch.randn(6, 8, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2, 3, 0, 1])


def test_a_step_adds_at_most_twelve_operations_to_a_plain_loop() -> None:
    assert count_extra_operations(make_mlp, X, Y) <= 12


def test_buffers_and_parameters_add_no_operation_each() -> None:
    few, many = (count_extra_operations(partial(make_normed, depth), X, Y) for depth in (2, 20))
    assert few == many <= 26


def test_skipping_spikes_adds_the_meter_on_the_device() -> None:
    reported, dropped = (count_extra_operations(make_mlp, X, Y, skip_spikes=skips) for skips in (False, True))
    assert 10 <= dropped - reported <= 30


# --- what the shortcuts must not change ---


def test_the_host_finds_the_spikes_that_the_device_finds() -> None:
    """Losses fall and jitter, with spikes in between; every seventh step is bad and not remembered."""
    device = torch.device("cpu")
    dropped, reported = SpikeMeter(device, size=8, skips=True), SpikeMeter(device, size=8)
    jitter = torch.randn(200, generator=torch.Generator().manual_seed(0))
    num_spikes = 0
    for k, noise in enumerate(jitter.tolist()):
        loss = torch.tensor(2 + noise / 20 + (8 if k % 31 == 30 else 0))
        is_bad = k % 7 == 6
        far = bool(dropped.judge(loss)) and not is_bad
        dropped.remember(loss, torch.tensor(is_bad))
        assert reported.observe(loss.item(), is_bad=is_bad) == far, k
        num_spikes += far
    assert num_spikes >= 4
    assert_same_bits(dropped.state_dict(), reported.state_dict())


def test_facts_read_late_and_out_of_order_report_the_same_spikes() -> None:
    step = make_step(spikes=SpikeMeter(torch.device("cpu"), size=8, threshold=8.0))
    loss_fn = loss_of(step.model)
    facts = [step(lambda b, k=k: loss_fn(b) * (100 if k in (10, 12) else 1), [batch(k)]) for k in range(14)]
    assert facts[11].read() is facts[11].read()
    assert [one.read().is_spike for one in reversed(facts)] == [k in (10, 12) for k in reversed(range(14))]


def test_facts_that_are_never_read_are_not_kept() -> None:
    step = make_step()
    for k in range(MOST_UNREAD + 5):
        step(loss_of(step.model), [batch(k)])
    assert len(step.spikes.unread) == MOST_UNREAD


def test_steps_before_a_loaded_state_do_not_count() -> None:
    step = make_step()
    old = [step(loss_of(step.model), [batch(k)]) for k in range(3)]
    state = step.state_dict()
    late = step(loss_of(step.model), [batch(3)])
    step.load_state_dict(state)
    assert not late.read().is_spike
    assert int(step.spikes.state_dict()["count"]) == len(old)


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_the_shortcut_past_adams_step_has_its_bits(kind: type[torch.optim.Adam]) -> None:
    """With a rate that is written, a parameter that gets no gradient at first, moments that are exchanged, a group
    that is added, and a state that is loaded."""
    models = [make_normed(2) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    late = [nn.Parameter(torch.ones(8)) for _ in range(2)]
    own, plain = (
        kind([*model.parameters(), extra], 1e-2, weight_decay=0.1, amsgrad=True, fused=True)
        for model, extra in zip(models, late, strict=True)
    )
    committer = Committer(own, None)
    new = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    for k in range(12):
        for optimizer, model, extra, added in zip((own, plain), models, late, new, strict=True):
            if k == 3:
                optimizer.param_groups[0]["lr"] = 1e-3
            if k == 6:
                state = optimizer.state[next(model.parameters())]
                state["exp_avg"] = state["exp_avg"] * 2
            if k == 8:
                optimizer.add_param_group({"params": [added], "lr": 0.1})
            if k == 10:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            generator = torch.Generator().manual_seed(k)
            for parameter in model.parameters():
                parameter.grad = torch.randn(parameter.shape, generator=generator)
            extra.grad = torch.ones(8) if k > 4 else None
            added.grad = torch.ones(3)
        if k == 10:
            committer.forget()
        commit_all([committer], torch.tensor(False), None)
        plain.step()
        for mine, other in zip(own.param_groups, plain.param_groups, strict=True):
            assert_same_bits(dict(enumerate(mine["params"])), dict(enumerate(other["params"])))
    assert committer._fused_adam.step(torch.tensor(0.0))
