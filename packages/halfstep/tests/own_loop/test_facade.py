"""`halfstep.Step` in a foreign loop."""

from __future__ import annotations

import warnings

import pytest
import torch

import halfstep as hs
from halfstep.errors import ConfigError, ModelError, PrecisionError, TrainingStopped
from halfstep.step.guard import GuardOptions
from halfstep.step.user_warnings import GIVEN
from tiny_training import batch, loss_of, make_model, poisoned


def fused(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def test_five_lines_train_a_model_and_say_what_happened() -> None:
    model = make_model()
    step = hs.Step(model, fused(model), precision="fp32", clip_norm=1.0, accumulate=2)
    outcomes = [step(loss_of(model), window) for window in step.windows([batch(k) for k in range(5)])]
    assert len(outcomes) == 3
    assert all(outcome.committed for outcome in outcomes)
    assert "committed, loss" in repr(outcomes[0])
    skipped = step(loss_of(model), [poisoned()])
    assert not skipped.committed
    assert skipped.reason == "loss is nan"


def test_a_run_of_bad_steps_ends_with_a_reason() -> None:
    model = make_model()
    step = hs.Step(model, fused(model), precision="fp32", guard=GuardOptions(max_consecutive=2))
    for _ in range(3):  # the guard looks two steps back
        step(loss_of(model), [poisoned()])
    with pytest.raises(TrainingStopped, match="2 bad steps in a row"):
        step(loss_of(model), [poisoned()])


def test_an_optimizer_that_is_not_fused_is_kept_and_the_price_is_named() -> None:
    model = make_model()
    GIVEN.clear()
    with pytest.warns(UserWarning, match="fused=True makes it free"):
        step = hs.Step(model, torch.optim.AdamW(model.parameters()), precision="fp32")
    assert step.describe()[0][:2] == ("AdamW", "select")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # once per process is enough
        hs.Step(model, torch.optim.SGD(model.parameters()), precision="fp32")


TORCH = torch.optim.lr_scheduler
SCHEDULERS = {
    "cosine": lambda o: TORCH.CosineAnnealingLR(o, 20),
    "chained": lambda o: TORCH.ChainedScheduler([TORCH.LinearLR(o, 0.1, 1.0, 3), TORCH.StepLR(o, 2, 0.5)]),
    "one after the other": lambda o: TORCH.SequentialLR(
        o, [TORCH.LinearLR(o, 0.1, 1.0, 3), TORCH.StepLR(o, 2, 0.5)], [3]
    ),
    "lambda": lambda o: TORCH.LambdaLR(o, lambda step: 1 / (1 + step)),
}


@pytest.mark.parametrize("name", sorted(SCHEDULERS))
@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*")
def test_torch_schedulers_are_followed_and_skipped_steps_do_not_move_them(name: str) -> None:
    model, twin = make_model(), make_model()
    expected, reference = [], torch.optim.SGD(twin.parameters(), lr=0.1)
    scheduler = SCHEDULERS[name](reference)
    for _ in range(8):
        expected.append(reference.param_groups[0]["lr"])
        reference.step()
        scheduler.step()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    step = hs.Step(model, optimizer, precision="fp32", schedule=hs.per_step(SCHEDULERS[name](optimizer)))
    found = []
    for k in range(8):
        assert not step(loss_of(model), [poisoned()]).committed
        found.append(step(loss_of(model), [batch(k)]).reading.lr)
    assert found == pytest.approx(expected, rel=1e-6)


def test_a_scheduler_that_also_moves_the_momentum_is_followed() -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    step = hs.Step(model, optimizer, precision="fp32", schedule=TORCH.OneCycleLR(optimizer, 0.1, total_steps=9))
    for k in range(3):
        step(loss_of(model), [batch(k)])
    assert optimizer.param_groups[0]["momentum"] == pytest.approx(0.85, abs=0.01)


def test_weights_are_never_recast_behind_the_optimizers_back() -> None:
    model = make_model()
    with pytest.raises(PrecisionError, match="bf16-true"):
        hs.Step(model, fused(model), precision=hs.Precision("bf16-true", simulate=True))


@pytest.mark.parametrize(("dtype", "precision"), [(torch.bfloat16, "bf16"), (torch.float64, "fp32")])
def test_a_model_stored_otherwise_is_refused_not_recast(dtype: torch.dtype, precision: str) -> None:
    model = make_model().to(dtype)
    with pytest.raises(PrecisionError, match="is stored in"):
        hs.Step(model, fused(model), precision=hs.Precision(precision, simulate=precision != "fp32"))
    assert model.conv.weight.dtype == dtype


def test_frozen_parts_keep_their_storage() -> None:
    model = make_model()
    model.conv.requires_grad_(False).half()
    step = hs.Step(model, torch.optim.AdamW(model.head.parameters(), fused=True), precision="fp32")
    assert model.conv.weight.dtype == torch.float16
    assert step.plan.granted == "fp32"


def test_onecycle_without_momentum_is_followed_to_its_end() -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    scheduler = TORCH.OneCycleLR(optimizer, 0.1, total_steps=6, cycle_momentum=False)
    step = hs.Step(model, optimizer, precision="fp32", schedule=scheduler)
    rates = [step(loss_of(model), [batch(k)]).reading.lr for k in range(6)]
    assert max(rates) == pytest.approx(0.1, rel=0.01)
    assert rates[-1] == pytest.approx(0.1 / 25 / 1e4, rel=1e-3)


def test_a_model_without_weights_is_refused() -> None:
    model = make_model()
    with pytest.raises(ModelError, match="no parameters"):
        hs.Step(torch.nn.ReLU(), fused(model), precision="fp32")


def test_simulated_bf16_runs_in_a_foreign_loop() -> None:
    model = make_model()
    step = hs.Step(model, fused(model), precision=hs.Precision("bf16", simulate=True))
    assert step.plan.simulated
    assert step(loss_of(model), [batch(0)]).committed


def test_state_survives_a_round_trip() -> None:
    model = make_model()
    step = hs.Step(model, fused(model), precision="fp32")
    step(loss_of(model), [batch(0)])
    other = hs.Step(model, fused(model), precision="fp32")
    other.load_state_dict(step.state_dict())
    assert other.attempted == 1
    assert len(other._guard.pending) == 1


@pytest.mark.parametrize(
    ("result", "says"),
    [
        (lambda loss: None, "the loss is None, not a tensor"),
        (lambda loss: loss.item(), "the loss is a float, not a tensor"),
        (lambda loss: (None, 3), "the loss is None, not a tensor"),
        (lambda loss: loss.detach(), "depends on no trained parameter"),
    ],
)
def test_a_loss_function_that_gives_no_loss_is_told_so_and_changes_nothing(result, says: str) -> None:
    model = make_model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    step = hs.Step(model, fused(model), precision="fp32")
    with pytest.raises(ConfigError, match=says):
        step(lambda b: result(loss_of(model)(b)), [batch(0)])
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert step(loss_of(model), [batch(0)]).committed


@pytest.mark.parametrize("given", [(None, None), (make_model(), None), (make_model(), [None]), ("unet", "adamw")])
def test_what_is_no_model_or_no_optimizer_is_refused_in_words(given: tuple[object, object]) -> None:
    with pytest.raises(ConfigError, match="a step takes a model and its optimizer"):
        hs.Step(*given)  # type: ignore[arg-type]


def test_an_optimizer_of_another_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="parameters of AdamW belongs to this"):
        hs.Step(make_model(), fused(make_model()), precision="fp32")


def test_an_optimizer_may_hold_more_than_the_models_weights() -> None:
    model, extra = make_model(), torch.nn.Parameter(torch.ones(()))
    hs.Step(model, torch.optim.AdamW([*model.parameters(), extra], fused=True), precision="fp32")


def test_a_misspelled_attribute_is_pythons_usual_error() -> None:
    model = make_model()
    step = hs.Step(model, fused(model), precision="fp32")
    with pytest.raises(AttributeError, match="'Step' object has no attribute 'commited'") as error:
        step.commited  # type: ignore[attr-defined]  # noqa: B018
    # Python suggests a name from these two.
    assert error.value.obj is step
    assert error.value.name == "commited"
