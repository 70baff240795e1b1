"""What people give `hs.Step`: right, or refused with the way to give it."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections import namedtuple
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import halfstep as hs
from halfstep.errors import ConfigError, HalfstepError, ModelError, PrecisionError
from own_steps import X, loss_of, made, sgd

# --- windows ---

Pair = namedtuple("Pair", "x y")
NO_WINDOWS: dict[str, Any] = {
    "a batch of x and y": [X, torch.zeros(8, dtype=torch.long)],
    "five batches": [X] * 5,
    "a pair": (X, X),
    "a tensor": X,
    "a dict": {"x": X},
    "a named tuple": Pair(X, X),
    "an array": np.ones((8, 4), dtype=np.float32),
    "a loader": torch.utils.data.DataLoader(X, 8),
    "a data set": torch.utils.data.TensorDataset(X),
    "a string": "batch",
    "nothing": None,
    "an endless iterator": iter(lambda: X, None),
}


@pytest.mark.parametrize("name", NO_WINDOWS)
def test_what_is_no_window_of_this_step_is_refused_with_the_way_to_give_one(name: str) -> None:
    model, step = made()
    before = model.weight.clone()
    with pytest.raises(ConfigError, match="the window") as error:
        step(loss_of(model), NO_WINDOWS[name])
    assert "step.windows(loader)" in error.value.fix
    assert "[batch]" in error.value.fix
    assert torch.equal(model.weight, before)


def test_a_tuple_of_tensors_is_a_batch_whatever_accumulate_is() -> None:
    model, step = made(accumulate=2)
    with pytest.raises(ConfigError, match="the window is a tuple of 2 tensors") as error:
        step(loss_of(model), (X, X))
    assert "[batch]" in error.value.fix
    with pytest.raises(ConfigError, match="different dtypes or dimensions"):
        step(loss_of(model), iter([X, X[0]]))
    assert step(loss_of(model), [X, X]).committed
    assert step(lambda batch: loss_of(model)(batch[0]), ((X, X), (X, X))).committed


def test_an_iterator_is_a_window_and_a_shorter_one_steps_too() -> None:
    model, step = made(accumulate=4)
    assert step(loss_of(model), (X for _ in range(4))).committed
    assert step(loss_of(model), [X]).committed


def test_an_empty_window_changes_nothing_and_says_so() -> None:
    model, step = made()
    assert step(loss_of(model), []).reason == "empty window"


@pytest.mark.parametrize("batch", [["a", "b"], None, SimpleNamespace(x=X), "text", np.ones((8, 4), dtype=np.float32)])
def test_a_batch_alone_may_be_anything(batch: object) -> None:
    model, step = made()
    assert step(lambda b: F.mse_loss(model(X), X), [batch]).committed


def test_a_batch_of_unknown_length_cannot_be_weighed_against_others() -> None:
    model, step = made(accumulate=2)
    with pytest.raises(HalfstepError, match=r"\(loss, weight\)"):
        step(lambda b: F.mse_loss(model(X), X), [None, None])


def test_windows_takes_a_loader_not_a_batch() -> None:
    _, step = made()
    for wrong in (X, {"x": X}, None):
        with pytest.raises(ConfigError, match="takes an iterable of batches"):
            next(step.windows(wrong))  # type: ignore[arg-type]


# --- what loss_fn gives ---

WRONG = {
    "None": (lambda loss, out: None, "the loss is None, not a tensor"),
    "a float": (lambda loss, out: loss.item(), "the loss is a float, not a tensor"),
    "(None, 3)": (lambda loss, out: (None, 3), "the loss is None, not a tensor"),
    "detached": (lambda loss, out: loss.detach(), "depends on no trained parameter"),
    "(loss, logits)": (lambda loss, out: (loss, out), "the weight of the batch"),
    "(loss, one logit)": (lambda loss, out: (loss, out[0, 0]), "with a gradient"),
    "(loss, dict)": (lambda loss, out: (loss, {"accuracy": 0.5}), "a dict"),
    "(logits, loss)": (lambda loss, out: (out, loss), "a tuple must be"),
    "(loss, accuracy 0)": (lambda loss, out: (loss, 0.0), r"\(loss, 0.0\)"),
    "(loss, accuracy)": (lambda loss, out: (loss, 0.37), r"\(loss, 0.37\)"),
    "(loss, -1)": (lambda loss, out: (loss, -1), r"\(loss, -1\)"),
    "(loss, nan)": (lambda loss, out: (loss, float("nan")), "nan"),
    "(loss, True)": (lambda loss, out: (loss, True), "a bool"),
    "three": (lambda loss, out: (loss, 1, 2), "3 values"),
    "a list": (lambda loss, out: [loss, 1], "a list"),
    "a dict of losses": (lambda loss, out: {"box": loss, "class": loss}, "of several losses, their sum"),
    "a dict with a loss": (lambda loss, out: {"loss": loss, "logits": out}, "a dict, not a tensor"),
    "a list of losses": (lambda loss, out: [loss, loss], "their sum"),
    "two losses": (lambda loss, out: (loss, loss), "the sum of several"),
    "an output with a loss": (lambda loss, out: SimpleNamespace(loss=loss), r"output\.loss"),
    "complex": (lambda loss, out: loss * torch.tensor(1j), "complex"),
    "unreduced": (lambda loss, out: out, r"\(8, 4\)"),
    "backward inside": (lambda loss, out: (loss.backward(), loss)[1], "backward"),
    "backward inside, graph kept": (lambda loss, out: (loss.backward(retain_graph=True), loss)[1], "backward"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_result_that_is_no_loss_is_refused_and_changes_nothing(name: str) -> None:
    give, says = WRONG[name]
    model, step = made()
    before = model.weight.clone()

    def loss_fn(x: Tensor) -> Any:
        out = model(x)
        return give(F.mse_loss(out, x), out)

    with pytest.raises(ConfigError, match=says):
        step(loss_fn, [X])
    assert torch.equal(model.weight, before)
    assert step(loss_of(model), [X]).committed


def test_a_forgotten_optimizer_window_or_loss_function_is_explained() -> None:
    model, step = made()
    with pytest.raises(ConfigError, match="its optimizer, or a list of optimizers, not Linear alone") as error:
        hs.Step(model)
    assert "hs.Step(model, torch.optim.AdamW(model.parameters()))" in error.value.fix
    with pytest.raises(ConfigError, match="loss_fn is a Tensor, not a function") as error:
        step(model(X).mean())
    assert "move the forward pass and the loss into loss_fn(batch)" in error.value.fix
    with pytest.raises(ConfigError, match="the window is missing") as error:
        step(loss_of(model))
    assert "step(loss_fn, [batch])" in error.value.fix


@pytest.mark.parametrize("weight", [8, 8.0, np.int64(8), torch.tensor(8), torch.tensor([8.0])])
def test_counts_are_weights(weight: Any) -> None:
    model, step = made(accumulate=2)
    assert step(lambda x: (F.mse_loss(model(x), x), weight), [X, X]).committed


def test_a_fraction_as_a_tensor_weighs_but_is_asked_about() -> None:
    model, step = made()
    with pytest.warns(UserWarning, match="accuracy"):
        step(lambda x: (F.mse_loss(model(x), x), torch.tensor(0.5)), [X])


# --- what a loop of torch's AMP may have left ---


def test_a_step_under_no_grad_is_refused() -> None:
    model, step = made()
    for context in (torch.no_grad(), torch.inference_mode()):
        with pytest.raises(ConfigError, match="no_grad"), context:
            step(loss_of(model), [X])


def test_an_autocast_around_the_step_is_noticed() -> None:
    model, step = made()
    with pytest.warns(UserWarning, match=r"inside torch\.autocast"), torch.autocast("cpu", torch.bfloat16):
        step(loss_of(model), [X])


def test_an_autocast_inside_loss_fn_that_is_not_the_plans_is_noticed() -> None:
    model, step = made()

    def loss_fn(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return F.mse_loss(model(x).float(), x)

    with pytest.warns(UserWarning, match="computes in bfloat16, but the plan uses fp32"):
        step(loss_fn, [X])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(loss_fn, [X])  # once is enough
        planned, own = made(precision=hs.Precision("bf16", simulate=True))
        own(lambda x: F.mse_loss(planned(x).float(), x), [X])


def test_a_loss_scaled_by_hand_is_noticed() -> None:
    model, step = made()
    scaler = torch.amp.GradScaler("cpu")
    with pytest.warns(UserWarning, match="GradScaler"):
        step(lambda x: scaler.scale(F.mse_loss(model(x), x)), [X])
    with pytest.warns(UserWarning, match="weights are updated twice"):
        scaler.step(next(iter(step.optimizers)))


def test_a_loss_divided_by_the_window_by_hand_is_noticed() -> None:
    """It would be trained and clipped at a fraction of itself."""
    model, step = made(accumulate=4)
    plain = loss_of(model)
    with pytest.warns(UserWarning, match="divided by 4: if this is for accumulation"):
        step(lambda x: plain(x) / 4, [X] * 4)
    fp16_model, fp16 = made(accumulate=4, precision=hs.Precision("fp16", simulate=True))
    with pytest.warns(UserWarning, match="divided by 4"):
        fp16(lambda x: loss_of(fp16_model)(x) / 4, [X])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(lambda x: plain(x) / 3, [X] * 4)
        step(lambda x: (plain(x) / 4).sqrt(), [X] * 4)
        step(lambda x: plain(x) / plain(x), [X] * 4)
        alone, by_one = made()
        by_one(lambda x: loss_of(alone)(x) / 1, [X])


def test_an_optimizer_that_is_also_stepped_by_hand_is_noticed() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = sgd(model)
    step, other = hs.Step(model, optimizer, "fp32"), hs.Step(model, optimizer, "fp32")
    for one in (step, other, step):
        one(loss_of(model), [X])
    with pytest.warns(UserWarning, match="weights are updated twice"):
        optimizer.step()


# --- arguments ---


ARGUMENTS: dict[str, tuple[dict[str, Any], type[HalfstepError], str]] = {
    "precision None": ({"precision": None}, PrecisionError, "unknown precision None"),
    "precision float64": ({"precision": torch.float64}, ConfigError, "float64"),
    "precision typo": ({"precision": "bf61"}, ConfigError, "bf16"),
    "accumulate 0": ({"accumulate": 0}, ConfigError, "accumulate=0"),
    "accumulate 1.5": ({"accumulate": 1.5}, ConfigError, "accumulate=1.5"),
    "clip_norm -1": ({"clip_norm": -1}, ConfigError, "clip_norm=-1"),
    "ema_decay 1.5": ({"ema_decay": 1.5}, ConfigError, "ema_decay=1.5"),
    "ema_decay 1": ({"ema_decay": 1}, ConfigError, "ema_decay=1"),
    "guard typo": ({"guard": {"max_consecutiv": 3}}, ConfigError, "max_consecutive"),
    "guard list": ({"guard": [3]}, ConfigError, "not a dict"),
    "guard value": ({"guard": {"on_fault": "retry"}}, ConfigError, "rollback"),
    "scaler typo": ({"scaler": {"init_scal": 3}}, ConfigError, "init_scale"),
    "scaler value": ({"scaler": {"growth_factor": 1}}, ConfigError, "growth_factor=1"),
    "capsules number": ({"capsules": 3}, ConfigError, "capsules=3"),
    "fast typo": ({"fast": "turbo"}, ConfigError, "fast='turbo' is not one of"),
    "memory typo": ({"memory": "lowest"}, ConfigError, "memory='lowest' is not one of"),
    "num_steps 0": ({"fast": hs.Fast(num_steps=0)}, ConfigError, "num_steps=0"),
    "max_graphs text": ({"fast": hs.Fast(max_graphs="8")}, ConfigError, "max_graphs='8'"),  # type: ignore[arg-type]
    "pure_ops text": ({"fast": hs.Fast(pure_ops="my_operator")}, ConfigError, "pure_ops='my_operator'"),
    "on_gradients number": ({"on_gradients": 5}, ConfigError, "on_gradients=5"),
    "on_outcome number": ({"on_outcome": 5}, ConfigError, "on_outcome=5"),
    "modules typo": ({"precision": hs.Precision("fp32", modules={"hed": "fp32"})}, PrecisionError, "hed"),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_that_cannot_be_used_are_refused_with_a_clear_error(name: str) -> None:
    arguments, kind, says = ARGUMENTS[name]
    with pytest.raises(HalfstepError, match=says) as error:
        made(**arguments)
    assert isinstance(error.value, HalfstepError)
    assert isinstance(error.value, kind) or kind is ConfigError
    assert error.value.fix


def test_arguments_people_write_are_taken() -> None:
    made(clip_norm=None, ema_decay=None, guard={})
    made(clip_norm=np.float32(1), accumulate=np.int64(2))
    _, step = made(precision=hs.Precision(torch.bfloat16, simulate=True))
    assert step.plan.granted == "bf16"
    model = nn.Linear(4, 4)
    hs.Step(model, (optimizer for optimizer in [sgd(model)]), "fp32")
    hs.Step(model, (sgd(model),), "fp32")


def test_a_grad_scaler_of_the_old_loop_hands_over_its_settings_and_its_scale() -> None:
    options = {"init_scale": 1024.0, "growth_factor": 4.0, "backoff_factor": 0.25, "growth_interval": 2}
    old = torch.amp.GradScaler("cpu", **options)
    old.load_state_dict({**old.state_dict(), "scale": 256.0})
    for given, first in ((options, 1024.0), (old, 256.0), (torch.amp.GradScaler("cpu", enabled=False), 65536.0)):
        model, step = made(precision=hs.Precision("fp16", simulate=True), scaler=given)
        scales = [step(loss_of(model), [X]).scale for _ in range(3)]
        assert scales[:2] == [first, first]
        assert scales[2] == (first if first == 65536.0 else 4 * first)
    assert made(precision=hs.Precision("fp16", simulate=True), scaler=options, accumulate=4)[1].scaler.first == 256.0
    model, step = made(scaler=options)  # bf16 and fp32 have no scale, and loops that switch between formats pass one
    assert step(loss_of(model), [X]).scale == 1.0


def test_models_that_cannot_be_trained_yet_are_refused() -> None:
    lazy, meta = nn.LazyLinear(2), nn.Linear(2, 2, device="meta")
    with pytest.raises(ModelError, match="lazy"):
        hs.Step(lazy, torch.optim.SGD(lazy.parameters(), 0.1), "fp32")
    with pytest.raises(ModelError, match="meta"):
        hs.Step(meta, torch.optim.SGD(meta.parameters(), 0.1), "fp32")
    model = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match="ModuleList"):
        hs.Step([model], sgd(model), "fp32")  # type: ignore[arg-type]


def test_a_frozen_half_part_may_be_in_the_optimizer() -> None:
    model = nn.Sequential(nn.Linear(4, 4).half().requires_grad_(False), nn.Linear(4, 4))
    step = hs.Step(model, sgd(model), "fp32")
    assert step(lambda x: F.mse_loss(model[1](x), x), [X]).committed


def test_parts_of_a_compiled_model_are_named_as_in_the_model() -> None:
    inner = nn.Sequential()
    inner.body, inner.head = torch.compile(nn.Sequential(nn.Linear(4, 4)), backend="eager"), nn.Linear(4, 4)
    model = torch.compile(inner, backend="eager")
    step = hs.Step(model, sgd(inner), hs.Precision("bf16", modules={"head": "fp32", "body.0": "fp32"}, simulate=True))
    parts = {row.module.replace("_orig_mod.", ""): row.compute for row in step.plan.rows}
    assert parts == {"body.0": "fp32", "head": "fp32"}
    with pytest.raises(PrecisionError, match="head") as error:
        hs.Step(model, sgd(inner), hs.Precision("bf16", modules={"haed": "fp32"}, simulate=True))
    assert "_orig_mod" not in error.value.fix


@pytest.mark.parametrize("name", ["lr", "weight_decay"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_setting_that_is_not_finite_is_refused_before_the_step(name: str, value: float) -> None:
    model, step = made()
    before = model.weight.clone()
    step.optimizers[0].param_groups[0][name] = value
    with pytest.raises(ConfigError, match=f"{name} of SGD is {value}"):
        step(loss_of(model), [X])
    assert torch.equal(model.weight, before)


def test_also_takes_one_module_or_anything_that_gives_several() -> None:
    other = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    for also in (other, other.parameters(), (other,), other[0].weight):
        made(also=also)
    for no_module in (3, "other", {"other": other}, other.named_parameters(), None):
        with pytest.raises(ConfigError, match="also="):
            made(also=no_module)


# --- keywords ---


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("clip_nrom", "did you mean 'clip_norm'"),
        ("precison", "did you mean 'precision'"),
        *((name, "clip_norm=1.0") for name in ("clip", "clip_grad", "max_norm", "gradient_clip_val")),
    ],
)
def test_an_unknown_keyword_is_refused_with_the_one_that_was_meant(name: str, fix: str) -> None:
    with pytest.raises(ConfigError, match=f"hs.Step has no argument '{name}'") as error:
        made(**{name: 1.0})
    assert error.value.fix.startswith(fix)


@pytest.mark.parametrize("group", [hs.Precision, hs.Fast])
def test_an_argument_of_a_group_is_refused_with_its_group(group: type) -> None:
    for field in dataclasses.fields(group)[1:]:
        with pytest.raises(ConfigError, match=f"hs.Step has no argument '{field.name}'") as error:
            made(**{field.name: True})
        assert f"hs.{group.__name__}(" in error.value.fix
        assert f"{field.name}=" in error.value.fix


def test_modules_are_a_mapping() -> None:
    with pytest.raises(ConfigError, match="modules= is a list"):
        hs.Precision("fp32", modules=["head"])  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:bf16 requested")
def test_a_scaler_with_bf16_is_reported_as_unused() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, fused=True)
    precision = hs.Precision("bf16", simulate=True)
    with pytest.warns(UserWarning, match=r"bf16 needs no scaler, so scaler=GradScaler\(...\) is not used"):
        hs.Step(model, optimizer, precision, scaler=torch.amp.GradScaler("cpu"))
    hs.Step(model, optimizer, precision, scaler=torch.amp.GradScaler("cpu", enabled=False))
    # Most CPUs emulate bf16, so that fp32 runs: the warning still names what was asked for.
    with pytest.warns(UserWarning, match="^bf16 needs no scaler"):
        hs.Step(model, optimizer, "bf16", scaler=torch.amp.GradScaler("cpu"))


@pytest.mark.parametrize("fused", [True, False])
def test_weights_that_are_not_finite_at_the_start_are_named_before_the_first_step(fused: bool) -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 2))
    with torch.no_grad():
        model[0].weight[7] = math.nan
    before = model[1].weight.detach().clone()
    options: dict[str, Any] = {"fused": True} if fused else {"foreach": False}
    step = hs.Step(model, torch.optim.AdamW(model.parameters(), 1e-3, **options), "fp32")
    with pytest.warns(UserWarning, match=r"not finite before the first step: 0.weight\. Steps do") as given:
        step(lambda tokens: model(tokens).square().mean(), [torch.arange(6)])
    assert {warning.filename for warning in given} == {__file__}, "at the user's line"
    for _ in range(6):  # neither is it warned of again, nor are steps dropped that do not use these numbers
        assert step(lambda tokens: model(tokens).square().mean(), [torch.arange(6)]).committed
    assert not torch.equal(before, model[1].weight)


@pytest.mark.filterwarnings("ignore:step . was dropped:UserWarning")
def test_a_stop_after_a_finite_step_that_was_far_too_large_says_so() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    step = hs.Step(model, torch.optim.SGD(model.parameters(), 1e25, fused=True), "fp32")

    def train() -> None:
        for _ in range(9):
            step(lambda x: model(x).square().mean(), [torch.ones(3, 4)])

    with pytest.raises(hs.TrainingStopped, match=r"finite and far too large \(weights up to \de\+2\d\)"):
        train()
