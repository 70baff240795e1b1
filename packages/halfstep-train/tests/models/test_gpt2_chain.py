"""GPT-2 as a chain of kernels against itself, layer by layer; and where the chain steps back."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from halfstep.recompute import set_recompute
from halfstep_train.kernels.fast_forms import force
from halfstep_train.workloads.language import gpt2 as gpt2_module
from halfstep_train.workloads.language.gpt2 import GPT2, build_gpt2

TOKENS = torch.randint(70, (2, 9), generator=torch.Generator().manual_seed(0))
TARGETS = torch.randint(70, (2, 9), generator=torch.Generator().manual_seed(1))


def tiny(**options: Any) -> GPT2:
    """No parameter is 0, which would hide what stands before it."""
    torch.manual_seed(0)
    model = build_gpt2("gpt2", depth=2, heads=2, dim=32, context=9, vocab=70, **options)
    for name, parameter in model.named_parameters():
        if "wte" not in name:
            nn.init.normal_(parameter, mean=float(bool((parameter == 1).all())), std=0.2)
    return model


def outcome(model: GPT2, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Loss and all gradients, in fp64."""
    is_half = dtype in (torch.float16, torch.bfloat16)
    model.zero_grad()
    with torch.autocast("cpu", dtype) if is_half else contextlib.nullcontext():
        logits = model(TOKENS)
    loss = F.cross_entropy(logits.double().flatten(0, 1), TARGETS.flatten())
    loss.backward()
    gradients = {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **gradients}


def errors(ours: dict[str, Tensor], exact: dict[str, Tensor]) -> list[float]:
    assert ours.keys() == exact.keys()
    return [float((ours[name] - exact[name]).norm() / exact[name].norm()) for name in exact]


def is_chained(model: GPT2, monkeypatch: pytest.MonkeyPatch) -> bool:
    calls = []
    inner = gpt2_module.run_blocks
    monkeypatch.setattr(gpt2_module, "run_blocks", lambda *a, **k: calls.append(1) or inner(*a, **k))
    with force(True, "chain"):
        outcome(model)
    return bool(calls)


def test_in_fp32_the_chain_is_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = outcome(tiny().double())
    with force(True, "chain"):
        assert max(errors(outcome(tiny()), exact)) < 1e-5
    assert is_chained(tiny(), monkeypatch)


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
def test_in_fp16_the_chain_is_as_near_to_fp64_as_the_model() -> None:
    exact = outcome(tiny().double())
    plain = outcome(tiny(), torch.float16)
    with force(True, "chain"):
        chained = outcome(tiny(), torch.float16)
    assert sum(errors(chained, exact)) < 1.7 * sum(errors(plain, exact))


def in_evaluation(model: GPT2) -> None:
    model.eval()


def hooked(model: GPT2) -> None:
    model.transformer.h[0].register_forward_hook(lambda *_: None)


def frozen(model: GPT2) -> None:
    model.transformer.h[1].ln_2.weight.requires_grad_(False)


def with_another_linear(model: GPT2) -> None:
    class Linear(nn.Linear):
        pass

    model.transformer.h[0].mlp.c_fc = Linear(32, 128)


def recomputing(model: GPT2) -> None:
    set_recompute(model, "blocks")


@pytest.mark.parametrize("change", [in_evaluation, hooked, frozen, with_another_linear, recomputing])
def test_the_chain_steps_back(change: Callable[[GPT2], None], monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny()
    change(model)
    assert not is_chained(model, monkeypatch)


@pytest.mark.parametrize("options", [{"dropout": 0.1}, {"bias": False}])
def test_the_chain_is_for_models_with_biases_and_without_dropout(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not is_chained(tiny(**options), monkeypatch)
