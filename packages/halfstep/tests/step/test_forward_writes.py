"""What forward writes in addition to buffers is put back: codebooks, momentum encoders, clamped and late tensors."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import halfstep as hs
from halfstep.errors import ModelError
from halfstep.step.step import GuardedStep
from tiny_training import assert_same_bits, batch, everything, loss_of, make_step, plan
from written_models import WAYS, Clamped, Codebook, Late, Momentum, good, spoiled, state_of


def step_of(model: nn.Module, precision: str = "fp32", **more: object) -> GuardedStep:
    return GuardedStep(model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True), plan(precision), **more)


def is_untouched_by_a_bad_step(step: GuardedStep, model: nn.Module) -> None:
    before = state_of(model)
    assert step(model, [spoiled()]).read().is_bad
    assert_same_bits(before, state_of(model))


@pytest.mark.parametrize("good_before", [0, 1, 3])
@pytest.mark.parametrize("way", WAYS)
def test_a_parameter_that_forward_writes_is_put_back_and_training_goes_on(way: str, good_before: int) -> None:
    torch.manual_seed(0)
    model = Codebook(way)
    twin = copy.deepcopy(model)
    step, plain = step_of(model), step_of(twin)
    for k in range(good_before):
        step(model, [good(k)])
        plain(twin, [good(k)])
    for _ in range(2):
        is_untouched_by_a_bad_step(step, model)
    for k in range(3):
        assert not step(model, [good(k)]).read().is_bad
        plain(twin, [good(k)])
    assert_same_bits(state_of(twin), state_of(model))


@pytest.mark.parametrize("way", ["in place", "through data"])
def test_code_that_was_compiled_is_no_exception(way: str) -> None:
    model = Codebook(way)
    step, compiled = step_of(model), torch.compile(model, backend="aot_eager")
    for k in range(2):
        step(compiled, [good(k)])
    before = state_of(model)
    assert step(compiled, [spoiled()]).read().is_bad
    assert_same_bits(before, state_of(model))


def test_a_codebook_that_is_infinite_behind_a_finite_loss_is_a_bad_step() -> None:
    model = Codebook("in place")
    step = step_of(model)
    step(model, [good()])

    def hidden(x: Tensor) -> Tensor:
        with torch.no_grad():
            model.code.fill_(float("inf"))
        return model.inner(x).square().mean()

    before = state_of(model)
    assert step(hidden, [good()]).read().is_ruined
    assert_same_bits(before, state_of(model))


def test_a_momentum_encoder_and_its_statistics_are_put_back() -> None:
    model = Momentum()
    step = step_of(model)
    step(model, [good()])
    is_untouched_by_a_bad_step(step, model)


@pytest.mark.parametrize("through_data", [False, True])
@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.RMSprop])
def test_a_trained_weight_that_forward_clamps_is_put_back(through_data: bool, optimizer: type) -> None:
    model = Clamped(through_data=through_data)
    step = GuardedStep(model, optimizer(model.parameters(), lr=1e-2), plan())
    is_untouched_by_a_bad_step(step, model)
    step(model, [good()])
    with torch.no_grad():
        model.weight.fill_(3.0)  # outside of the bounds again
    is_untouched_by_a_bad_step(step, model)


def test_what_is_written_later_than_in_the_first_window_is_saved_from_then_on() -> None:
    model = Codebook("in place")
    model.start = 3
    step = step_of(model)
    for k in range(5):
        assert not step(model, [good(k)]).read().is_bad
    is_untouched_by_a_bad_step(step, model)


@pytest.mark.parametrize("way", ["in place", "other storage"])
def test_a_bad_step_that_writes_a_parameter_for_the_first_time_ends_the_run_by_name(way: str) -> None:
    model = nn.ModuleDict({"quantiser": Codebook(way)})
    model["quantiser"].start = 2
    step = step_of(model)
    for k in range(2):
        step(model["quantiser"], [good(k)])
    with pytest.raises(ModelError, match=r"wrote quantiser\.code in its forward pass") as stopped:
        step(model["quantiser"], [spoiled()])
    assert "also=" in stopped.value.fix


@pytest.mark.parametrize("way", WAYS)
def test_a_parameter_named_beforehand_is_saved_from_the_start(way: str) -> None:
    model = Codebook(way)
    model.start = 2
    step = step_of(model, also=[model.code])
    for k in range(2):
        step(model, [good(k)])
    is_untouched_by_a_bad_step(step, model)


def test_a_tensor_of_no_module_can_be_named_too() -> None:
    model, seen = nn.Linear(4, 4), torch.zeros(4)
    step = step_of(model, also=[seen])

    def loss_fn(x: Tensor) -> Tensor:
        seen.add_(x.sum(0))
        return model(x).square().mean()

    step(loss_fn, [good()])
    before = seen.clone()
    assert before.any()
    step(loss_fn, [spoiled()])
    assert torch.equal(seen, before)


def test_parameters_outside_the_model_that_are_trained_are_watched_as_well() -> None:
    model, temperature = nn.Linear(4, 4), Clamped(through_data=True)
    optimizer = torch.optim.AdamW([*model.parameters(), *temperature.parameters()], fused=True)
    step = GuardedStep(model, optimizer, plan())
    loss_fn = lambda x: temperature(model(x))  # noqa: E731
    step(loss_fn, [good()])
    with torch.no_grad():
        temperature.weight.fill_(3.0)
    before = state_of(model, temperature)
    step(loss_fn, [spoiled()])
    assert_same_bits(before, state_of(model, temperature))


def test_a_trained_weight_that_forward_replaces_is_refused_by_name() -> None:
    class Replacing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            self.weight = nn.Parameter(self.weight.detach() / 2)
            return (x * self.weight).square().mean()

    model = Replacing()
    held = model.weight
    with pytest.raises(ModelError, match="replaces the parameter weight, which an optimizer trains") as refused:
        step_of(model)(model, [good()])
    assert "copy_" in refused.value.fix
    assert model.weight is held
    assert held.tolist() == [1.0] * 4


@pytest.mark.parametrize("what", ["buffer", "loose buffer", "module"])
@pytest.mark.parametrize("good_before", [0, 1, 2])
def test_what_is_registered_in_a_forward_pass_is_put_back_or_taken_back(what: str, good_before: int) -> None:
    model = Late(what)
    step = step_of(model)
    for k in range(good_before):
        step(model, [good(k)])
    is_untouched_by_a_bad_step(step, model)
    assert not step(model, [good()]).read().is_bad
    is_untouched_by_a_bad_step(step, model)


def test_a_module_added_between_steps_is_guarded() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    step = step_of(model)
    loss_fn = lambda x: model(x).pow(3).mean()  # noqa: E731
    step(loss_fn, [good()])
    model.append(nn.BatchNorm1d(4))
    before = state_of(model)
    assert step(loss_fn, [spoiled()]).read().is_bad
    assert_same_bits(before, state_of(model))
    model[1] = nn.BatchNorm1d(4)  # in place of the other
    before = state_of(model)
    assert step(loss_fn, [spoiled()]).read().is_bad
    assert_same_bits(before, state_of(model))


def test_an_exception_in_forward_undoes_what_was_written() -> None:
    for way in WAYS:
        model = Codebook(way)
        step = step_of(model)

        def breaks(x: Tensor, model: nn.Module = model) -> Tensor:
            model(x)
            raise RuntimeError("user's own")

        for _ in range(2):
            before = state_of(model)
            with pytest.raises(RuntimeError, match="user's own"):
                step(breaks, [good()])
            assert_same_bits(before, state_of(model))
            step(model, [good()])


def test_after_state_was_loaded_the_next_window_counts_as_a_first_one() -> None:
    model = Codebook("through data")
    model.start = 2
    step = step_of(model)
    for k in range(2):
        step(model, [good(k)])
    step.load_state_dict(step.state_dict())
    is_untouched_by_a_bad_step(step, model)


def test_models_that_write_only_buffers_cost_no_copies_of_their_parameters() -> None:
    for precision in ("fp32", "bf16", "fp16"):
        step = make_step("adamw", precision)
        step.model.conv.requires_grad_(False)
        for k in range(3):
            step(loss_of(step.model), [batch(k)])
        assert not step.writes.written


def test_a_window_that_is_not_committed_is_undone_by_the_next() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    once, twice = (step_of(copy.deepcopy(model)) for _ in range(2))
    twice.compute(lambda x: twice.model(x).pow(3).mean(), [good(7)])
    for step in (once, twice):
        step(lambda x, step=step: step.model(x).pow(3).mean(), [good(1)])
    assert_same_bits(everything(once), everything(twice))


# --- several networks in one loop ---


def make_critic(precision: str = "fp32") -> tuple[nn.Module, nn.Module, hs.Step]:
    """Return a generator, a critic, both with BatchNorm, and the critic's step, which guards the generator."""
    torch.manual_seed(0)
    generator, critic = (
        nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, outputs)) for outputs in (4, 1)
    )
    optimizer = torch.optim.Adam(critic.parameters(), 1e-3, fused=True)
    asked = hs.Precision(precision, simulate=precision != "fp32")
    return generator, critic, hs.Step(critic, optimizer, asked, also=[generator])


def test_fp16_leaves_both_alone_when_a_scale_is_too_high() -> None:
    generator, critic, step = make_critic("fp16")
    before = state_of(generator, critic)
    assert not step(lambda x: critic(generator(x)).mean() * 1e4, [good()]).committed
    assert_same_bits(before, state_of(generator, critic))


def test_a_step_clears_no_gradient_of_a_network_that_it_only_guards() -> None:
    generator, critic, step = make_critic()
    generator(good()).sum().backward()
    kept = [weight.grad for weight in generator.parameters()]
    step(lambda x: critic(x).square().mean(), [good()])
    assert all(weight.grad is gradient for weight, gradient in zip(generator.parameters(), kept, strict=True))


def test_a_frozen_teacher_is_not_copied_but_its_statistics_are_guarded() -> None:
    student, teacher = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).requires_grad_(False)
    step = hs.Step(student, torch.optim.AdamW(student.parameters(), fused=True), "fp32", also=[teacher])
    loss_fn = lambda x: (student(x) - teacher(x)).square().mean()  # noqa: E731
    assert step(loss_fn, [good()]).committed
    before = state_of(student, teacher)
    assert not step(loss_fn, [spoiled()]).committed
    assert_same_bits(before, state_of(student, teacher))
    assert not step._step.writes.written
