from __future__ import annotations

import contextlib
from collections.abc import Callable
from statistics import mean

import pytest
import torch
from torch import Tensor, nn

from halfstep.errors import ConfigError
from halfstep.recompute import Recompute, set_recompute
from halfstep_train.kernels import transformer_chain
from halfstep_train.kernels.fast_forms import force
from halfstep_train.models import vit as vit_module
from halfstep_train.models.vit import SelfAttention, ViT, ViTSize, build_vit, resize_positions
from halfstep_train.workloads.classification.build import load_classifier_

TINY = ViTSize(depth=2, heads=2, dim=8, mlp_dim=16, patch=4)


def tiny(**options: object) -> ViT:
    torch.manual_seed(0)
    model = ViT(TINY, **{"num_classes": 3, "image_size": 16, **options})  # type: ignore[arg-type]
    nn.init.normal_(model.heads[0].weight)  # type: ignore[arg-type]  # a zero head would hide the encoder
    return model


def state_as_saved_by_torchvision(model: ViT) -> dict[str, Tensor]:
    """The released files still have the first names of the perceptron's layers."""
    return {
        name.replace("mlp.0.", "mlp.linear_1.").replace("mlp.3.", "mlp.linear_2."): value
        for name, value in model.state_dict().items()
    }


@pytest.mark.parametrize(
    ("name", "num_classes", "count"),
    [("vit_s_16", 1000, 22_050_664), ("vit_b_16", 1000, 86_567_656), ("vit_l_16", 1000, 304_326_632)],
)
def test_the_parameter_count_is_the_published_one(name: str, num_classes: int, count: int) -> None:
    with torch.device("meta"):
        model = build_vit(name, num_classes=num_classes)
    assert sum(p.numel() for p in model.parameters()) == count


def test_layers_carry_torchvisions_names() -> None:
    with torch.device("meta"):
        names = set(build_vit("vit_b_16").state_dict())
    outer = {"class_token", "conv_proj.weight", "conv_proj.bias", "encoder.pos_embedding"}
    outer |= {"encoder.ln.weight", "encoder.ln.bias", "heads.head.weight", "heads.head.bias"}
    parts = ("ln_1.weight", "ln_1.bias", "ln_2.weight", "ln_2.bias")
    parts += tuple(
        f"self_attention.{p}" for p in ("in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias")
    )
    parts += ("mlp.0.weight", "mlp.0.bias", "mlp.3.weight", "mlp.3.bias")
    assert names == outer | {f"encoder.layers.encoder_layer_{i}.{part}" for i in range(12) for part in parts}


def test_attention_equals_torchs_multihead_attention_on_the_same_weights() -> None:
    torch.manual_seed(0)
    ours = SelfAttention(12, 3).double()
    theirs = nn.MultiheadAttention(12, 3, batch_first=True).double()
    nn.init.normal_(ours.in_proj_bias)
    nn.init.normal_(ours.out_proj.bias)
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(2, 5, 12, dtype=torch.float64)
    mine, other = (x.clone().requires_grad_() for _ in range(2))
    out, expected = ours(mine, 5), theirs(other, other, other, need_weights=False)[0]
    torch.testing.assert_close(out, expected)
    out.square().sum().backward()
    expected.square().sum().backward()
    torch.testing.assert_close(mine.grad, other.grad)
    torch.testing.assert_close(ours.in_proj_weight.grad, theirs.in_proj_weight.grad)


def test_the_whole_model_equals_torchs_transformer_encoder_on_the_same_weights() -> None:
    model = tiny().double().eval()
    x = torch.randn(2, 3, 16, 16, dtype=torch.float64)
    tokens = model.conv_proj(x).flatten(2).transpose(1, 2)
    tokens = torch.cat([model.class_token.expand(2, -1, -1), tokens], 1) + model.encoder.pos_embedding
    for block in model.encoder.layers:
        layer = nn.TransformerEncoderLayer(
            8, 2, 16, dropout=0.0, activation="gelu", layer_norm_eps=1e-6, batch_first=True, norm_first=True
        ).double()
        renamed = {
            "ln_1": "norm1",
            "ln_2": "norm2",
            "self_attention": "self_attn",
            "mlp.0": "linear1",
            "mlp.3": "linear2",
        }
        state = block.state_dict()
        for ours, theirs in renamed.items():
            state = {name.replace(ours, theirs): value for name, value in state.items()}
        layer.load_state_dict(state)
        tokens = layer(tokens)
    torch.testing.assert_close(model(x), model.heads(model.encoder.ln(tokens))[:, 0])


def test_the_released_names_of_torchvisions_files_load() -> None:
    theirs, ours = tiny(), ViT(TINY, num_classes=3, image_size=16)
    load_classifier_(ours, state_as_saved_by_torchvision(theirs), source="vit_b_16-c867db91.pth", replace_head=False)
    assert all(torch.equal(value, ours.state_dict()[name]) for name, value in theirs.state_dict().items())


def test_weights_for_another_image_size_load_with_interpolated_positions() -> None:
    theirs, ours = tiny(), ViT(TINY, num_classes=3, image_size=24)
    load_classifier_(ours, theirs.state_dict(), source="w.pth", replace_head=False)
    x = torch.randn(1, 3, 24, 24)
    torch.testing.assert_close(ours(x), theirs(x))


def test_positions_of_the_models_own_size_are_untouched_and_the_class_tokens_always() -> None:
    positions = torch.randn(1, 17, 8)
    assert resize_positions(positions, 4, 4) is positions
    larger = resize_positions(positions, 6, 5)
    assert larger.shape == (1, 31, 8)
    assert torch.equal(larger[:, 0], positions[:, 0])


def test_an_image_that_patches_cannot_tile_is_named() -> None:
    with pytest.raises(ConfigError, match="18 pixels.* multiple of 4"):
        tiny()(torch.randn(1, 3, 18, 16))


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [True, False])
def test_the_model_compiles_without_graph_breaks(checkpointing: bool) -> None:
    model, eager, x = tiny(checkpointing=checkpointing), tiny(), torch.randn(2, 3, 16, 16)
    torch.compile(model, backend="aot_eager", fullgraph=True)(x).square().mean().backward()
    eager(x).square().mean().backward()
    for a, b in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


# --- A vision transformer as a chain of kernels against itself, layer by layer; and where the chain steps back ---

IMAGES = torch.randn(3, 3, 12, 12, generator=torch.Generator().manual_seed(5))


def tiny_vit(**options: float) -> ViT:
    """9 patches, 3 blocks; no parameter is 0, which would hide what stands before it."""
    torch.manual_seed(0)
    size = ViTSize(depth=3, heads=2, dim=32, mlp_dim=96, patch=4)
    model = ViT(size, num_classes=3, image_size=12, **options)  # type: ignore[arg-type]
    for parameter in model.parameters():
        nn.init.normal_(parameter, mean=float(bool((parameter == 1).all())), std=0.2)
    return model


def outcome(model: nn.Module, images: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """Logits and all gradients, in fp64, computed under autocast to a half `dtype`, or plainly in another."""
    is_half = dtype in (torch.float16, torch.bfloat16)
    model.zero_grad()
    with torch.autocast("cpu", dtype) if is_half else contextlib.nullcontext():
        logits = model(images)
    (logits.double() * torch.arange(1, logits.numel() + 1).view_as(logits)).sum().backward()
    gradients = {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}
    return {"logits": logits.detach().double(), **gradients}


def chain_is_used(model: ViT, run: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> bool:
    calls = []
    inner = vit_module.run_blocks
    monkeypatch.setattr(vit_module, "run_blocks", lambda *a, **k: calls.append(1) or inner(*a, **k))
    with force(True, "chain", "class_token"):
        run()
    return bool(calls)


def errors(ours: dict[str, Tensor], exact: dict[str, Tensor]) -> list[float]:
    assert ours.keys() == exact.keys()
    return [float((ours[name] - exact[name]).norm() / exact[name].norm()) for name in exact]


@pytest.fixture
def own_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our kernel for attention's backward where there is no GPU, behind a forward that stands in for cuDNN's; in bf16
    Triton's interpreter could not multiply matrices."""

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
    model = tiny_vit()
    exact = outcome(tiny_vit().double(), IMAGES.double(), torch.float64)
    set_recompute(model, how)
    with force(True, "chain", "class_token"):
        assert max(errors(outcome(model, IMAGES, torch.float32), exact)) < 1e-5


def test_in_fp32_the_chain_is_the_model() -> None:
    model = tiny_vit()
    exact = outcome(tiny_vit().double(), IMAGES.double(), torch.float64)
    with force(True, "chain", "class_token"):
        assert max(errors(outcome(model, IMAGES, torch.float32), exact)) < 1e-5


# Triton's interpreter cuts bf16 off where a GPU rounds: twice the error.
@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
@pytest.mark.parametrize(("dtype", "times"), [(torch.float16, 1.7), (torch.bfloat16, 3)])
def test_in_a_half_format_the_chain_is_as_near_to_fp64_as_the_model(dtype: torch.dtype, times: float) -> None:
    model = tiny_vit()
    exact = outcome(tiny_vit().double(), IMAGES.double(), torch.float64)
    plain = outcome(model, IMAGES, dtype)
    with force(True, "chain", "class_token"):
        chained = outcome(model, IMAGES, dtype)
    assert mean(errors(chained, exact)) < times * mean(errors(plain, exact))


def test_what_is_not_kept_changes_no_gradient_to_the_bit() -> None:
    with force(True, "chain", "class_token"):
        kept, again = tiny_vit(), tiny_vit()
        set_recompute(again, "pointwise")
        first, second = outcome(kept, IMAGES, torch.float16), outcome(again, IMAGES, torch.float16)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_not_keeping_saves_memory_for_backward() -> None:
    sizes = []
    for how in ("none", "pointwise"):
        model, kept = tiny_vit(), {}
        set_recompute(model, how)  # type: ignore[arg-type]

        def pack(value: Tensor, kept: dict[int, int] = kept) -> Tensor:
            kept[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
            return value

        with force(True, "chain"), torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
            model(IMAGES)
        sizes.append(sum(kept.values()))
    # Of 2 blocks: 2 LayerNorms and a GELU, 2 · 32 + 96 channels, 30 tokens, 4 bytes.
    assert sizes[0] - sizes[1] == 2 * (2 * 32 + 96) * 30 * 4


@pytest.mark.slow
def test_compiled_code_breaks_off_for_the_chain_and_goes_on() -> None:
    model = tiny_vit()
    exact = outcome(tiny_vit().double(), IMAGES.double(), torch.float64)
    with force(True, "chain", "class_token"):
        compiled = torch.compile(model, backend="aot_eager")
        logits = compiled(IMAGES)
        weights = torch.arange(1, logits.numel() + 1).view_as(logits)
        (logits * weights).sum().backward()
    ours = {"logits": logits.detach().double(), **{n: p.grad.double() for n, p in model.named_parameters()}}  # type: ignore[union-attr]
    assert max(errors(ours, exact)) < 1e-5


def hooked(model: ViT) -> None:
    model.encoder.layers[0].ln_2.register_forward_hook(lambda *_: None)  # type: ignore[union-attr]


def listened_to_as_a_whole(model: ViT) -> None:
    model.encoder.layers.register_forward_pre_hook(lambda *_: None)


def frozen(model: ViT) -> None:
    model.encoder.layers[1].self_attention.in_proj_bias.requires_grad_(False)  # type: ignore[union-attr]


def with_another_linear(model: ViT) -> None:
    class Other(nn.Linear):
        pass

    model.encoder.layers[0].mlp[0] = Other(32, 96)  # type: ignore[index,union-attr,operator]


def with_approximate_gelu(model: ViT) -> None:
    model.encoder.layers[0].mlp[1].approximate = "tanh"  # type: ignore[index,union-attr,operator]


def without_a_bias(model: ViT) -> None:
    model.encoder.layers[0].mlp[2] = nn.Linear(96, 32, bias=False)  # type: ignore[index,union-attr,operator]


def without_activation(model: ViT) -> None:
    model.encoder.layers[0].mlp[1] = nn.Identity()  # type: ignore[index,union-attr,operator]


class Doubled(nn.Module):
    """A wrapped module whose output shows whether it was called."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = 2 * self.inner(x)
        return y


def with_a_wrapped_perceptron(model: ViT) -> None:
    block = model.encoder.layers[0]
    block.mlp = Doubled(block.mlp)  # type: ignore[arg-type]


def with_a_wrapped_block(model: ViT) -> None:
    model.encoder.layers[0] = Doubled(model.encoder.layers[0])


def with_a_norm_for_a_block(model: ViT) -> None:
    model.encoder.layers[0] = nn.LayerNorm(32)


def truncated(model: ViT) -> None:
    model.encoder.layers = nn.Sequential(*list(model.encoder.layers)[:2])  # type: ignore[assignment]


def in_evaluation(model: ViT) -> None:
    model.eval()


def checkpointed(model: ViT) -> None:
    set_recompute(model, "blocks")


@pytest.mark.parametrize(
    "change",
    [
        *(hooked, listened_to_as_a_whole, frozen, with_another_linear, with_approximate_gelu, without_a_bias),
        *(without_activation, in_evaluation, checkpointed, with_a_wrapped_perceptron, with_a_wrapped_block),
        *(with_a_norm_for_a_block, truncated),
    ],
)
def test_the_layers_run_where_the_chain_would_be_noticed(
    change: Callable[[ViT], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_vit()
    assert chain_is_used(model, lambda: model(IMAGES), monkeypatch)
    change(model)
    assert not chain_is_used(model, lambda: model(IMAGES), monkeypatch)


def test_the_layers_run_without_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_vit()
    with torch.no_grad():
        assert not chain_is_used(model, lambda: model(IMAGES), monkeypatch)


@pytest.mark.parametrize("change", [with_a_wrapped_block, with_a_norm_for_a_block])
def test_a_block_replaced_after_compiling_is_called(change: Callable[[ViT], None]) -> None:
    torch.compiler.reset()
    model = tiny_vit()
    compiled = torch.compile(model, backend="eager")
    with force(True, "chain"):
        compiled(IMAGES)
        change(model)
        logits = compiled(IMAGES)
    with force(False):
        torch.testing.assert_close(logits, model(IMAGES))
