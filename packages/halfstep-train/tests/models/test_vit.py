from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from halfstep.errors import ConfigError
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
