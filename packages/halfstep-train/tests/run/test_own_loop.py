"""What `hs.Step` does in a custom loop."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import halfstep as hs
from halfstep.errors import ConfigError, TrainingStopped
from own_steps import X, loss_of, made, sgd

BAD = X * float("nan")


def stepped(step: hs.Step, model: nn.Module, times: int) -> None:
    for _ in range(times):
        step(loss_of(model), [BAD])


def over_windows(step: hs.Step, model: nn.Module, batches: list[Tensor]) -> None:
    for window in step.windows(batches):
        step(loss_of(model), window)


# --- what is seen of it ---


def test_train_is_a_function_and_no_module_has_its_name() -> None:
    from halfstep import train

    assert hs.train is train
    assert train.__module__ == "halfstep_train.api"
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("halfstep.train")


def test_a_step_shows_what_it_is() -> None:
    _, step = made(accumulate=2)
    assert repr(step) == "Step(Linear, SGD, fp32 on cpu, accumulate=2, eager, 0 steps made)"


def test_an_outcome_tells_loss_gradient_rate_and_scale() -> None:
    model, step = made(precision=hs.Precision("fp16", simulate=True))
    outcome = step(loss_of(model), [X])
    assert outcome.loss == pytest.approx(F.mse_loss(model(X), X).item(), rel=0.2)
    assert outcome.grad_norm > 0
    assert (outcome.lr, outcome.scale, outcome.step) == (pytest.approx(0.1), 65536.0, 0)
    assert outcome.item() == float(outcome) == outcome.loss
    assert f"{outcome:.2f}" == f"{outcome.loss:.2f}"
    assert f"{outcome}" == repr(outcome)


def test_on_outcome_is_called_with_every_step_in_order() -> None:
    seen: list[hs.Outcome] = []
    model, step = made(on_outcome=seen.append)
    for k in range(4):
        step(loss_of(model), [BAD if k == 1 else X])
    assert [outcome.step for outcome in seen] == [0, 1]  # two steps later, when reading costs no wait
    step.finish()
    assert [outcome.committed for outcome in seen] == [True, False, True, True]


# --- the end of a loop ---


def test_bad_steps_at_the_very_end_of_a_loop_raise_as_well() -> None:
    model, step = made()
    with pytest.raises(TrainingStopped, match="5 bad steps"):
        over_windows(step, model, [X] + [BAD] * 5)
    model, step = made()
    with pytest.raises(TrainingStopped, match="5 bad steps"), step:
        stepped(step, model, 5)
    model, step = made()
    stepped(step, model, 5)
    with pytest.raises(TrainingStopped, match="5 bad steps"):
        step.finish()


def test_an_error_inside_with_is_not_hidden_by_the_guards() -> None:
    model, step = made()
    stepped(step, model, 5)
    with pytest.raises(ZeroDivisionError), step:
        _ = 1 / 0


# --- advice that can be followed ---


def test_the_advice_of_a_stopped_loop_is_made_of_arguments_that_exist() -> None:
    model, step = made()
    with pytest.raises(TrainingStopped) as error:
        stepped(step, model, 9)
    assert isinstance(error.value, hs.TrainingStopped)
    assert "samples" not in error.value.fix  # these batches have no ids
    assert 'guard={"on_fault": "rollback"}' in error.value.fix
    assert "clip_norm=1.0" in error.value.fix
    made(clip_norm=1.0, guard={"on_fault": "rollback"})


# --- evaluation ---


def test_averaged_holds_the_average_inside_and_the_weights_outside() -> None:
    model, step = made(ema_decay=0.5)
    for _ in range(3):
        step(loss_of(model), [X])
    own = model.weight.clone()
    with step.averaged():
        assert not torch.equal(model.weight, own)
    assert torch.equal(model.weight, own)
    _, plain = made()
    with pytest.raises(ConfigError, match="ema_decay"), plain.averaged():
        pass


# --- a gradient penalty ---


def critic() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    for parameter in model.parameters():
        nn.init.normal_(parameter, 0, 1e-4)
    return model


def test_the_inner_gradient_of_a_penalty_survives_fp16_and_overflow_drops_the_step() -> None:
    model = critic()
    x = torch.randn(16, 8)
    tracked = x.clone().requires_grad_()
    truth = torch.autograd.grad(model(tracked).sum(), tracked)[0]
    step = hs.Step(model, sgd(model, 0.0), hs.Precision("fp16", simulate=True))
    found = []

    def loss_fn(x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        gradient = step.grad(model(x), x)
        found.append(gradient.detach())
        return (gradient.norm(dim=1) - 1).square().mean()

    outcomes = [step(loss_fn, [x]) for _ in range(12)]
    kept = [gradient for gradient, outcome in zip(found, outcomes, strict=True) if outcome.committed]
    assert kept
    for gradient, outcome in zip(found, outcomes, strict=True):
        assert outcome.committed <= bool(gradient.isfinite().all())
    # The weights are 1e-4, their products 1e-8: below fp16's smallest number without scaling.
    torch.testing.assert_close(kept[-1], truth, rtol=2e-2, atol=2e-10)


def test_an_overflow_that_the_loss_hides_drops_the_step_all_the_same() -> None:
    model = critic()
    step = hs.Step(model, sgd(model), hs.Precision("fp16", simulate=True))

    def loss_fn(x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        gradient = step.grad(model(x) * 1e9, x)
        return gradient.nan_to_num(0, 0, 0).sum() * 0 + model(x).float().sum()

    assert not step(loss_fn, [torch.randn(4, 8)]).committed


def test_a_penalty_of_what_is_not_tracked_is_refused() -> None:
    model, step = made()
    with pytest.raises(ConfigError, match="requires_grad_"):
        step(lambda x: step.grad(model(x), x).sum(), [X])


class FailingBetweenGroups(torch.optim.Optimizer):
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                p.data.sub_(p.grad)
            raise KeyError("mine")


def test_an_optimizer_that_raises_between_its_groups_says_that_weights_may_be_half_stepped() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    optimizer = FailingBetweenGroups([{"params": part.parameters()} for part in model], {"lr": 1.0})
    step, before = hs.Step(model, optimizer, "fp32"), model[0].bias.clone()
    with pytest.raises(KeyError, match="mine") as error:
        step(lambda x: model(x).square().mean(), [torch.randn(8, 4)])
    assert not torch.equal(model[0].bias, before)
    (note,) = error.value.__notes__
    assert "FailingBetweenGroups may have updated some of its parameters" in note
    assert "may be between two steps" in note
