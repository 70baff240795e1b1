"""Odd optimizers, odd parameters, odd buffers: the promise holds for them, too, or they are refused."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from torch import nn

from halfstep.errors import ConfigError
from halfstep.precision.plan import PlanRow
from halfstep.step.ema import Ema
from halfstep.step.flat import Snapshot, became_non_finite
from halfstep.step.scaler import Scaler
from halfstep.step.schedule import ScheduleOptions, build_schedule
from halfstep.step.step import Step
from tiny_training import assert_same_bits, batch, everything, loss_of, make_model, make_step, plan, poisoned


class Homemade(torch.optim.Optimizer):
    """Keeps a Python counter and replaces its state tensor instead of writing into it."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr, "calls": 0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["calls"] += 1
            for p in group["params"]:
                own = self.state[p]
                own["m"] = 0.9 * own.get("m", torch.zeros_like(p)) + p.grad
                p.sub_(own["m"], alpha=group["lr"])


def test_an_optimizer_that_is_not_torchs_is_decided_on_the_host() -> None:
    model = make_model()
    step = Step(model, Homemade(model.parameters()), plan())
    assert step.describe()[0][1] == "host"
    loss_fn = loss_of(model)
    for k in range(2):
        step(loss_fn, [batch(k)])
    before = everything(step)
    step(loss_fn, [poisoned()])
    assert_same_bits(before, everything(step))
    assert step.optimizers[0].param_groups[0]["calls"] == 2


@pytest.mark.parametrize("optimizer", ["sgd", "rmsprop"])
def test_parameters_with_gaps_in_memory_are_put_back(optimizer: str) -> None:
    class Gappy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 6)[:, ::2])

        def forward(self, x):
            return x @ self.weight.t()

    model = Gappy()
    made = {"sgd": torch.optim.SGD, "rmsprop": torch.optim.RMSprop}[optimizer](model.parameters(), lr=0.1)
    step = Step(model, made, plan(), ema=Ema(model, decay=0.5))
    loss_fn = lambda x: model(x).square().mean()  # noqa: E731
    for _ in range(2):
        step(loss_fn, [torch.ones(2, 3)])
    before = everything(step)
    step(loss_fn, [torch.full((2, 3), float("nan"))])
    assert_same_bits(before, everything(step))
    assert torch.isfinite(step.ema.state_dict()["weight"]).all()


def test_a_parameter_in_two_optimizers_is_unscaled_once() -> None:
    model = nn.Linear(2, 1, bias=False)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.0, fused=True) for _ in range(2)]
    step = Step(model, optimizers, plan("fp16"))
    norm = step(lambda x: model(x).sum() / 4, [torch.ones(1, 2)]).read().grad_norm
    assert norm == pytest.approx(2**0.5 / 4, rel=1e-3)


def test_a_group_added_later_is_unscaled_too_or_refused_under_a_schedule() -> None:
    model, more = nn.Linear(2, 1, bias=False), nn.Linear(2, 1, bias=False)
    both = nn.ModuleList([model, more])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, fused=True)
    step = Step(both, optimizer, plan("fp16"))
    optimizer.add_param_group({"params": more.parameters()})
    norm = step(lambda x: (model(x).sum() + more(x).sum()) / 4, [torch.ones(1, 2)]).read().grad_norm
    assert norm == pytest.approx(0.5, rel=1e-3)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    scheduled = Step(both, optimizer, plan(), schedules=[build_schedule(ScheduleOptions())])
    optimizer.add_param_group({"params": more.parameters()})
    with pytest.raises(ConfigError, match="parameter group was added"):
        scheduled(lambda x: model(x).sum(), [torch.ones(1, 2)])


@pytest.mark.parametrize("dampening", [0.0, 0.5])
def test_a_parameter_used_later_begins_its_momentum_as_torchs_unfused_sgd_would(dampening: float) -> None:
    def trained(*, fused: bool) -> nn.Module:
        torch.manual_seed(0)
        model = nn.ModuleList([nn.Linear(2, 1), nn.Linear(2, 1)])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, dampening=dampening, fused=fused)
        step = Step(model, optimizer, plan())
        for k in range(4):
            used = model if k >= 2 else model[:1]
            step(lambda x, used=used: sum(part(x).square().mean() for part in used), [torch.ones(3, 2)])
        return model

    for name, value in trained(fused=True).state_dict().items():
        torch.testing.assert_close(value, trained(fused=False).state_dict()[name])


class Odd(nn.Module):
    """Its buffer is replaced, made on first use, or resized, as the flag says."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.inner, self.kind = nn.Linear(2, 2), kind
        self.register_buffer("seen", None if kind == "made" else torch.zeros(2))

    def forward(self, x):
        total = x.detach().sum(0)
        if self.kind == "resized":
            self.seen = torch.cat([self.seen, total])
        else:
            self.seen = total if self.seen is None else self.seen + total
        return self.inner(torch.nan_to_num(x, posinf=1.0) if self.kind == "hidden" else x)


@pytest.mark.parametrize("kind", ["replaced", "made", "resized"])
@pytest.mark.parametrize("good_before", [0, 2])
def test_buffers_that_are_not_written_in_place_are_put_back(kind: str, good_before: int) -> None:
    model = Odd(kind)
    step = Step(model, torch.optim.AdamW(model.parameters(), fused=True), plan())
    loss_fn = lambda x: model(x).mean()  # noqa: E731
    for _ in range(good_before):
        step(loss_fn, [torch.ones(3, 2)])
    before = None if model.seen is None else model.seen.clone()
    step(loss_fn, [torch.full((3, 2), float("nan"))])
    assert (model.seen is None) if before is None else torch.equal(model.seen, before)


def test_a_replaced_buffer_that_became_infinite_behind_a_finite_loss_is_a_bad_step() -> None:
    model = Odd("hidden")
    step = Step(model, torch.optim.AdamW(model.parameters(), fused=True), plan())
    loss_fn = lambda x: model(x).mean()  # noqa: E731
    step(loss_fn, [torch.ones(3, 2)])
    reading = step(loss_fn, [torch.full((3, 2), float("inf"))]).read()
    assert reading.is_ruined
    assert model.seen.tolist() == [3.0, 3.0]


def test_the_average_follows_a_buffer_that_the_module_replaces() -> None:
    model = Odd("replaced")
    step = Step(model, torch.optim.AdamW(model.parameters(), fused=True), plan(), ema=Ema(model, decay=0.0))
    for _ in range(3):
        step(lambda x: model(x).mean(), [torch.ones(3, 2)])
    assert torch.equal(step.ema.state_dict()["seen"], model.seen)
    with step.ema.swap_in():
        assert model.seen.tolist() == [9.0, 9.0]


def test_loading_a_state_twice_gives_the_same_twice() -> None:
    """A rollback may go to the same snapshot again: what was trained since must not have written into it."""
    step = make_step("adamw")
    loss_fn = loss_of(step.model)
    step(loss_fn, [batch(0)])
    state, model = copy.deepcopy(step.state_dict()), copy.deepcopy(step.model.state_dict())
    found = []
    for _ in range(2):
        step.model.load_state_dict(model)
        step.load_state_dict(state)
        found.append(everything(step))
        for k in range(3):
            step(loss_fn, [batch(k)])
    assert_same_bits(*found)


def test_one_part_in_fp16_is_enough_for_loss_scaling() -> None:
    row = PlanRow(module="head", storage="fp32", compute="fp16", reason="asked for", kind="module", precision="fp16")
    assert not plan("bf16").needs_loss_scaling
    assert dataclasses.replace(plan("bf16"), rows=(row,)).needs_loss_scaling


def test_steps_that_say_nothing_about_the_scale_leave_it_alone() -> None:
    step = make_step("adamw", "fp16")
    loss_fn = loss_of(step.model)
    for _ in range(3):
        assert step(lambda b: (loss_fn(b), 0), [batch(0)]).read().is_empty
    assert step.scaler.growth_tracker.item() == 0
    assert step.scaler.value.item() == 65536


def test_two_steps_may_share_a_scaler() -> None:
    """Alternating phases, as a VAE and its discriminator: an overflow in one lowers the scale of both."""
    model, judge = make_model(), make_model()
    scaler = Scaler(torch.device("cpu"), enabled=True)
    steps = [
        Step(net, torch.optim.AdamW(net.parameters(), fused=True), plan("fp16"), scaler=scaler)
        for net in (model, judge)
    ]
    steps[0](loss_of(model), [poisoned()])
    reading = steps[1](loss_of(judge), [batch(0)]).read()
    assert reading.scale == 32768
    assert not reading.is_bad


def test_an_exception_in_the_loss_leaves_no_trace() -> None:
    step = make_step()
    loss_fn = loss_of(step.model)
    step(loss_fn, [batch(0)])
    before = everything(step)

    def breaks(b):
        loss_fn(b)
        raise RuntimeError("user's own")

    with pytest.raises(RuntimeError, match="user's own"):
        step(breaks, [batch(1)])
    assert_same_bits(before, everything(step))


def test_losses_that_cannot_be_judged_are_refused() -> None:
    step = make_step()
    with pytest.raises(ConfigError, match="shape"):
        step(lambda b: torch.stack([loss_of(step.model)(b)] * 2), [batch(0)])
    assert not step(lambda b: loss_of(step.model)(b).reshape(1), [batch(0)]).read().is_bad


def test_gradients_of_weights_that_no_optimizer_holds_do_not_pile_up() -> None:
    model = make_model()
    step = Step(model, torch.optim.AdamW(model.head.parameters(), fused=True), plan())
    loss_fn = loss_of(model)
    norms = []
    for _ in range(2):
        step(loss_fn, [batch(0)])
        norms.append(model.conv.weight.grad.norm().item())
    assert norms[1] < 1.5 * norms[0]


def test_facts_carry_the_generator_state_of_their_step() -> None:
    step = make_step()
    torch.manual_seed(5)
    expected = torch.get_rng_state()
    facts = step(loss_of(step.model), [batch(0)])
    assert torch.equal(facts.rng["cpu"], expected)


def test_a_schedule_may_end_where_the_training_ends_but_not_before() -> None:
    rates = [1.0, 0.5, 0.25]
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, fused=True)
    step = Step(model, optimizer, plan(), schedules=[lambda k: rates[k]])
    found = [step(loss_of(model), [batch(k)]).read().lr for k in range(3)]
    assert found == rates
    with pytest.raises(ConfigError, match="no learning rate for step 3"):
        step(loss_of(model), [batch(4)])


def test_a_loss_that_the_user_writes_into_later_is_reported_as_it_was() -> None:
    step = make_step("sgd", accumulate=2)
    seen: list[torch.Tensor] = []

    def loss_fn(b: dict[str, torch.Tensor]) -> torch.Tensor:
        loss = 0 * loss_of(step.model)(b) + b["wanted"]
        seen[:] = [seen[0].add_(loss.detach())] if seen else [loss.detach()]
        return loss

    window = [{**batch(k), "wanted": torch.tensor(wanted)} for k, wanted in enumerate((1.0, 5.0))]
    assert step(loss_fn, window).read().loss == 3.0


@pytest.mark.parametrize("dtype", [torch.float8_e5m2, torch.bfloat16, torch.float64], ids=str)
def test_a_number_of_any_format_that_stops_being_finite_is_found(dtype: torch.dtype) -> None:
    before = torch.tensor([1.0, float("inf"), 2.0]).to(dtype)
    assert not became_non_finite(before, torch.tensor([3.0, float("nan"), 4.0]).to(dtype))
    assert became_non_finite(before, torch.tensor([3.0, 1.0, float("inf")]).to(dtype))


@pytest.mark.parametrize("is_bad", [True, False])
def test_a_joined_copy_of_many_dtypes_selects_the_bits_of_each(is_bad: bool) -> None:
    """`select` is what a GPU runs. Odd lengths, gaps, a conjugate, -0.0 and NaN; saved twice, into the same memory."""
    kinds = (torch.int64, torch.bfloat16, torch.float32, torch.bool, torch.complex64, torch.float64, torch.float32)
    tensors = [torch.tensor([1.0, 0.0, 3.0]).to(dtype) for dtype in kinds]
    tensors += [
        torch.tensor(7),
        torch.arange(8.0)[::2],
        torch.ones(2, 3).T,
        torch.ones(3, dtype=torch.complex64).conj(),
    ]
    snapshot = Snapshot(tensors)
    snapshot.save()
    for tensor in tensors:
        tensor.add_(tensor.clone())
    snapshot.save()
    then = [tensor.clone() for tensor in tensors]
    for tensor in tensors:
        tensor.copy_(torch.tensor(float("nan")) if tensor.is_floating_point() else tensor * 0)
    tensors[2][0] = -0.0
    now = [tensor.clone() for tensor in tensors]
    pairs = snapshot.pair_floats()
    assert {saved.dtype for saved, _ in pairs} == {t.dtype for t in tensors if t.is_floating_point() or t.is_complex()}
    assert sum(int((new != new).sum()) for _, new in pairs) == sum(int((t != t).sum()) for t in tensors)
    for group in snapshot.groups:
        group.select(torch.tensor(is_bad))
    found, wanted = ([one.resolve_conj() for one in own] for own in (tensors, then if is_bad else now))
    assert_same_bits(dict(enumerate(found)), dict(enumerate(wanted)))


def test_a_short_onecycle_has_a_peak_too() -> None:
    schedule = build_schedule(ScheduleOptions(name="onecycle", total_steps=10, peak_share=0.1))
    assert max(schedule(k) for k in range(10)) == pytest.approx(1.0)
