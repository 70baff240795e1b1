"""`halfstep.Step` in a foreign loop."""

from __future__ import annotations

import warnings

import pytest
import torch

import halfstep as hs
from halfstep.errors import ConfigError, ModelError, PrecisionError
from tiny_training import make_model


def fused(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def test_an_optimizer_that_is_not_fused_is_kept() -> None:
    model = make_model()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step = hs.Step(model, torch.optim.AdamW(model.parameters()), precision="fp32")
    assert step.describe()[0][:2] == ("AdamW", "select")


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


def test_a_model_without_weights_is_refused() -> None:
    model = make_model()
    with pytest.raises(ModelError, match="no parameters"):
        hs.Step(torch.nn.ReLU(), fused(model), precision="fp32")


def test_an_optimizer_of_another_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="trains no parameter of this"):
        hs.Step(make_model(), fused(make_model()), precision="fp32")


def test_an_optimizer_may_hold_more_than_the_models_weights() -> None:
    model, extra = make_model(), torch.nn.Parameter(torch.ones(()))
    hs.Step(model, torch.optim.AdamW([*model.parameters(), extra], fused=True), precision="fp32")
