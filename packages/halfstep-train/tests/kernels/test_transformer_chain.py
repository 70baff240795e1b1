"""Compare the kernel chains of GPT-2 and of a vision transformer with their layers, and test when they are refused."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from statistics import mean
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from halfstep.recompute import Recompute, set_recompute
from halfstep_train.kernels import transformer_chain
from halfstep_train.kernels.fast_forms import force
from halfstep_train.models import vit as vit_module
from halfstep_train.models.vit import ViT, ViTSize
from halfstep_train.workloads.language import gpt2 as gpt2_module
from halfstep_train.workloads.language.gpt2 import build_gpt2

INPUTS = {
    "gpt2": torch.randint(70, (2, 9), generator=torch.Generator().manual_seed(0)),
    "vit": torch.randn(3, 3, 12, 12, generator=torch.Generator().manual_seed(5)),
}
MODULES: dict[str, Any] = {"gpt2": gpt2_module, "vit": vit_module}


def make(kind: str, **options: Any) -> Any:
    """Return a model without a parameter of 0, which would hide what precedes it."""
    torch.manual_seed(0)
    model: nn.Module
    if kind == "gpt2":
        model = build_gpt2("gpt2", depth=2, heads=2, dim=32, context=9, vocab=70, **options)
    else:
        model = ViT(ViTSize(depth=3, heads=2, dim=32, mlp_dim=96, patch=4), num_classes=3, image_size=12, **options)
    for name, parameter in model.named_parameters():
        if "wte" not in name:
            nn.init.normal_(parameter, mean=float(bool((parameter == 1).all())), std=0.2)
    return model


def run(kind: str, model: nn.Module) -> Tensor:
    dtype = next(model.parameters()).dtype
    logits: Tensor = model(INPUTS[kind].to(dtype) if kind == "vit" else INPUTS[kind])
    return logits


def compute_gradients(kind: str, model: nn.Module, half: torch.dtype | None = None) -> dict[str, Tensor]:
    """Return logits and all gradients in fp64, computed under autocast to `half`, or plainly."""
    model.zero_grad()
    with torch.autocast("cpu", half) if half else contextlib.nullcontext():
        logits = run(kind, model)
    (logits.double() * torch.arange(1, logits.numel() + 1).view_as(logits)).mean().backward()
    gradients = {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}
    return {"logits": logits.detach().double(), **gradients}


def compute_chained(kind: str, model: nn.Module, half: torch.dtype | None = None) -> dict[str, Tensor]:
    with force(True, "chain", "class_token"):
        return compute_gradients(kind, model, half)


def find_errors(ours: dict[str, Tensor], exact: dict[str, Tensor]) -> list[float]:
    assert ours.keys() == exact.keys()
    return [float((ours[name] - exact[name]).norm() / exact[name].norm()) for name in exact]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the kinds of models whose chain was called."""
    seen: list[str] = []
    for kind, module in MODULES.items():
        chain = module.run_blocks
        monkeypatch.setattr(
            module, "run_blocks", lambda *a, kind=kind, chain=chain, **k: seen.append(kind) or chain(*a, **k)
        )
    return seen


@pytest.fixture
def own_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run our backward kernel of attention without a GPU: the forward is plain torch instead of cuDNN, and in fp32,
    because Triton's interpreter cannot multiply bf16 matrices."""

    def attention(qkv: Tensor, num_heads: int) -> tuple[Tensor, Tensor]:
        q, k, v = transformer_chain.split_heads(qkv, num_heads).float()
        scores = q @ k.transpose(2, 3) * q.shape[3] ** -0.5
        out = (scores.softmax(3) @ v).transpose(1, 2).flatten(2)
        return out.to(qkv.dtype), scores.logsumexp(3)

    monkeypatch.setattr(transformer_chain, "is_short", lambda *_: True)
    monkeypatch.setattr(transformer_chain, "run_cudnn_attention", attention)


@pytest.mark.usefixtures("own_attention")
@pytest.mark.parametrize("how", ["none", "pointwise"])
def test_in_fp32_the_chain_with_its_own_attention_is_the_model(how: Recompute) -> None:
    model = make("vit")
    exact = compute_gradients("vit", make("vit").double())
    set_recompute(model, how)
    assert max(find_errors(compute_chained("vit", model), exact)) < 1e-5


@pytest.mark.parametrize("kind", MODULES)
def test_in_fp32_the_chain_is_the_model(kind: str, calls: list[str]) -> None:
    exact = compute_gradients(kind, make(kind).double())
    assert not calls
    assert max(find_errors(compute_chained(kind, make(kind)), exact)) < 1e-5
    assert calls == [kind]


# Triton's interpreter cuts bf16 off where a GPU rounds: twice the error.
@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
@pytest.mark.parametrize(
    ("kind", "half", "times"), [("gpt2", torch.float16, 1.7), ("vit", torch.float16, 1.7), ("vit", torch.bfloat16, 3)]
)
def test_in_a_half_format_the_chain_is_as_near_to_fp64_as_the_model(kind: str, half: torch.dtype, times: float) -> None:
    exact = compute_gradients(kind, make(kind).double())
    plain, chained = compute_gradients(kind, make(kind), half), compute_chained(kind, make(kind), half)
    assert mean(find_errors(chained, exact)) < times * mean(find_errors(plain, exact))


def test_what_is_not_kept_changes_no_gradient_to_the_bit() -> None:
    kept, again = make("vit"), make("vit")
    set_recompute(again, "pointwise")
    first, second = (compute_chained("vit", model, torch.float16) for model in (kept, again))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_not_keeping_saves_memory_for_backward() -> None:
    sizes = []
    for how in ("none", "pointwise"):
        model, kept = make("vit"), {}
        set_recompute(model, how)  # type: ignore[arg-type]

        def pack(value: Tensor, kept: dict[int, int] = kept) -> Tensor:
            kept[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
            return value

        with force(True, "chain"), torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
            run("vit", model)
        sizes.append(sum(kept.values()))
    # Of 2 blocks: 2 LayerNorms and a GELU, 2 · 32 + 96 channels, 30 tokens, 4 bytes.
    assert sizes[0] - sizes[1] == 2 * (2 * 32 + 96) * 30 * 4


@pytest.mark.slow
def test_compiled_code_breaks_off_for_the_chain_and_goes_on() -> None:
    model = make("vit")
    exact = compute_gradients("vit", make("vit").double())
    found = compute_chained("vit", torch.compile(model, backend="aot_eager"))
    assert max(find_errors({name.removeprefix("_orig_mod."): value for name, value in found.items()}, exact)) < 1e-5


# --- where the chain steps back ---


class Linear(nn.Linear):
    """Another class than torch's."""


class Doubled(nn.Module):
    """A wrapped module whose output shows whether it was called."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = 2 * self.inner(x)
        return y


def wrap_block(model: ViT) -> None:
    model.encoder.layers[0] = Doubled(model.encoder.layers[0])


def replace_block(model: ViT) -> None:
    model.encoder.layers[0] = nn.LayerNorm(32)


CHANGES: dict[str, Callable[[Any], object]] = {
    "gpt2 in evaluation": lambda model: model.eval(),
    "gpt2 with a hook": lambda model: model.transformer.h[0].register_forward_hook(lambda *_: None),
    "gpt2 with a frozen norm": lambda model: model.transformer.h[1].ln_2.weight.requires_grad_(False),
    "gpt2 with another linear": lambda model: setattr(model.transformer.h[0].mlp, "c_fc", Linear(32, 128)),
    "gpt2 recomputing blocks": lambda model: set_recompute(model, "blocks"),
    "vit in evaluation": lambda model: model.eval(),
    "vit with a hook": lambda model: model.encoder.layers[0].ln_2.register_forward_hook(lambda *_: None),
    "vit with a hook on all blocks": lambda model: model.encoder.layers.register_forward_pre_hook(lambda *_: None),
    "vit with a frozen bias": lambda model: model.encoder.layers[1].self_attention.in_proj_bias.requires_grad_(False),
    "vit with another linear": lambda model: model.encoder.layers[0].mlp.__setitem__(0, Linear(32, 96)),
    "vit with approximate GELU": lambda model: setattr(model.encoder.layers[0].mlp[1], "approximate", "tanh"),
    "vit without activation": lambda model: model.encoder.layers[0].mlp.__setitem__(1, nn.Identity()),
    "vit without a bias": lambda model: model.encoder.layers[0].mlp.__setitem__(2, nn.Linear(96, 32, bias=False)),
    "vit recomputing blocks": lambda model: set_recompute(model, "blocks"),
    "vit with a wrapped perceptron": lambda model: setattr(
        model.encoder.layers[0], "mlp", Doubled(model.encoder.layers[0].mlp)
    ),
    "vit with a wrapped block": wrap_block,
    "vit with a norm for a block": replace_block,
    "vit truncated": lambda model: setattr(model.encoder, "layers", nn.Sequential(*list(model.encoder.layers)[:2])),
}


@pytest.mark.parametrize("name", CHANGES)
def test_the_layers_run_where_the_chain_would_be_noticed(name: str, calls: list[str]) -> None:
    kind = name.split()[0]
    model = make(kind)
    CHANGES[name](model)
    with force(True, "chain", "class_token"):
        run(kind, model)
    assert not calls


@pytest.mark.parametrize("options", [{"dropout": 0.1}, {"bias": False}])
def test_the_chain_is_for_models_with_biases_and_without_dropout(options: dict[str, Any], calls: list[str]) -> None:
    compute_chained("gpt2", make("gpt2", **options))
    assert not calls


def test_the_layers_run_without_gradients(calls: list[str]) -> None:
    with torch.no_grad(), force(True, "chain"):
        run("vit", make("vit"))
    assert not calls


@pytest.mark.parametrize("change", [wrap_block, replace_block])
def test_a_block_replaced_after_compiling_is_called(change: Callable[[ViT], None]) -> None:
    torch.compiler.reset()
    model = make("vit")
    compiled = torch.compile(model, backend="eager")
    with force(True, "chain"):
        run("vit", compiled)
        change(model)
        logits = run("vit", compiled)
    with force(False):
        torch.testing.assert_close(logits, run("vit", model))
