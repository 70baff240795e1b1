"""SlotContrast's parts: equal to the original where golden data are, and to plain forms of themselves always."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from golden import assert_golden, golden, group
from halfstep.precision.contexts import simulate
from halfstep_train.models.weights import load_weights_
from halfstep_train.workloads.slots.backbones import build_dinov2, load_backbone_weights_
from halfstep_train.workloads.slots.config import SlotContrastModelConfig
from halfstep_train.workloads.slots.scores import compute_cosines, label_pixels, slot_contrast
from halfstep_train.workloads.slots.slot_attention import update_recurrently
from halfstep_train.workloads.slots.slot_decoder import SlotContrast, SlotDecoder, choose_even_chunk, rename_upstream

TINY = SlotContrastModelConfig(slots=4, slot_dim=16, decoder_hidden=(48, 48, 48))


def test_the_original_is_equalled_from_pixels_to_gradients() -> None:
    tensors, facts = golden("slotcontrast_tiny")
    state, out = group(tensors, "state/"), group(tensors, "out/")
    backbone = build_dinov2("vit_small_patch14_dinov2", depth=2, heads=2, dim=32)
    load_backbone_weights_(backbone, state, source="golden")
    with torch.no_grad():
        features = backbone(tensors["in/video"].flatten(0, 1)).unflatten(0, (2, 3))
    assert_golden(features, out["backbone_features"], name="features")
    model = SlotContrast(TINY, 32, 16)
    load_weights_(model, rename_upstream(state), source="golden")
    found = model(features)
    assert_golden(model.encoder(features), out["features"], name="encoded")
    for ours, theirs in (("slots", "slots"), ("predicted", "slots_predicted"), ("shares", "attn"), ("masks", "masks")):
        assert_golden(found[ours], out[theirs], name=ours)
    painted, masks = model.decoder(found["slots"].flatten(0, 1))
    assert_golden(painted.unflatten(0, (2, 3)), out["recon"], name="recon")
    assert_golden(masks.unflatten(0, (2, 3)), out["masks"], name="masks by layers")
    contrast = slot_contrast(found["slots"])
    slots = F.normalize(found["slots"], dim=-1)
    assert_golden(compute_cosines(slots, slots) / 0.1, out["contrast_logits"])
    assert float(found["error"].detach()) == pytest.approx(facts["scalars"]["loss_featrec"], rel=1e-5)
    assert float(contrast.detach()) == pytest.approx(facts["scalars"]["loss_ss"], rel=1e-5)
    (found["error"] + 0.5 * contrast).backward()
    gradients = rename_upstream(group(tensors, "grad/"))
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert_golden(parameter.grad, gradients[name], name=name)
    labels = label_pixels(found["masks"], (40, 40))
    assert int((labels != out["decoder_labels_40"]).sum()) <= 4, "margins are as small as 3e-6"


def test_features_equal_dinov2_of_transformers_at_the_tables_own_size() -> None:
    from transformers import Dinov2Config, Dinov2Model

    torch.manual_seed(0)
    theirs = Dinov2Model(
        Dinov2Config(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=56, layerscale_value=0.5)
    ).eval()
    ours = build_dinov2("vit_small_patch14_dinov2", depth=2, heads=2, dim=32)
    load_backbone_weights_(ours, theirs.state_dict(), source="transformers")
    images = torch.randn(2, 3, 56, 56)
    with torch.no_grad():
        expected = theirs(images).last_hidden_state
        torch.testing.assert_close(ours.encoder.ln(ours.compute_tokens(images)), expected, atol=2e-5, rtol=1e-5)


def in_names_of_timm(state: dict[str, Tensor]) -> dict[str, Tensor]:
    renamed = {"mask_token": torch.zeros(1, 32)}  # released files hold more than the encoder
    for name, value in state.items():
        name = name.replace("encoder.layers.encoder_layer_", "blocks.").replace("encoder.pos_embedding", "pos_embed")
        name = name.replace("class_token", "cls_token").replace("conv_proj", "patch_embed.proj")
        name = name.replace("self_attention.in_proj_", "attn.qkv.").replace("self_attention.out_proj", "attn.proj")
        name = name.replace(".ln_", ".norm").replace(".ls_", ".ls")
        name = name.replace("mlp.0", "mlp.fc1").replace("mlp.3", "mlp.fc2")
        renamed[name.replace("encoder.ln", "norm")] = value
    return renamed


@pytest.mark.parametrize("named", [dict, in_names_of_timm])
def test_features_of_an_earlier_block_come_from_the_whole_file(named: Callable[..., dict[str, Tensor]]) -> None:
    torch.manual_seed(0)
    whole, part = (build_dinov2("vit_small_patch14_dinov2", depth=depth, heads=2, dim=32, grid=2) for depth in (3, 2))
    load_backbone_weights_(part, named(whole.state_dict()), source="vit.pth")
    seen: list[Tensor] = []
    whole.get_submodule("encoder.layers.encoder_layer_1").register_forward_hook(lambda *call: seen.append(call[2]))
    images = torch.randn(1, 3, 28, 28)
    with torch.no_grad():
        whole(images)
        assert torch.equal(part.compute_tokens(images), seen[0])


def decoder(**options: object) -> SlotDecoder:
    torch.manual_seed(0)
    made = SlotDecoder(6, (12, 10), 5, num_positions=9)
    for name, value in options.items():
        setattr(made, name, value)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return made


def plain(made: SlotDecoder, slots: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    out = made.mlp(slots.unsqueeze(2) + made.pos_emb)
    masks = torch.softmax(out[..., -1:].float(), dim=1)
    painted = (out[..., :-1].float() * masks).sum(1)
    return (painted - target).square().sum(), masks.squeeze(-1)


def step(made: SlotDecoder, how: object, slots: Tensor, target: Tensor) -> list[Tensor]:
    made.zero_grad()
    slots = slots.clone().requires_grad_()
    error, masks = how(slots, target)  # type: ignore[operator]
    with torch.autocast("cpu", enabled=False):  # as a run's backward
        (3.0 * error / target.numel()).backward()
    return [error.detach(), masks.detach(), slots.grad, *(parameter.grad for parameter in made.parameters())]  # type: ignore[list-item]


@pytest.mark.parametrize("chunk", [0, 1, 2, 3])
@pytest.mark.parametrize("is_hooked", [False, True])
def test_streaming_equals_the_whole_form_with_all_gradients(chunk: int, is_hooked: bool) -> None:
    made, slots, target = decoder(chunk=chunk), torch.randn(4, 3, 6), torch.randn(4, 9, 5)
    calls: list[int] = []
    if is_hooked:
        made.mlp.layers[2].register_forward_hook(lambda *_: calls.append(1))
    expected = step(made, lambda *inputs: plain(made, *inputs), slots, target)
    calls.clear()
    for one, other in zip(step(made, made.compute_squared_error, slots, target), expected, strict=True):
        torch.testing.assert_close(one, other, atol=2e-6, rtol=2e-5)
    assert bool(calls) is is_hooked


@pytest.mark.parametrize("format", ["bf16", "fp16"])
def test_streaming_in_half_formats_is_as_near_to_fp32_as_the_whole_form(format: str) -> None:
    made, slots, target = decoder(chunk=2), torch.randn(4, 3, 6), torch.randn(4, 9, 5)
    exact = step(made, lambda *inputs: plain(made, *inputs), slots, target)
    with simulate(format):
        whole = step(made, lambda *inputs: plain(made, *inputs), slots, target)
        streamed = step(made, made.compute_squared_error, slots, target)
    for place, (one, other, true) in enumerate(zip(streamed, whole, exact, strict=True)):
        off, usual = (float((found.float() - true).norm() / true.norm().clamp(min=1e-3)) for found in (one, other))
        assert off < 2 * usual + 0.01, (place, off, usual)


def test_fp16_keeps_gradients_that_a_mean_would_round_to_zero() -> None:
    """The gradient of a mean over 1e8 values is below fp16's smallest number; streaming never holds it."""
    made, slots = decoder(), torch.randn(2, 3, 6)
    target = made(slots)[0].detach() + 1e-2
    with simulate("fp16"):
        error, _ = made.compute_squared_error(slots, target)
    (error / 1e8).backward()
    grad = made.mlp.layers[0].weight.grad
    assert grad is not None
    assert float(grad.abs().max()) > 0


@pytest.mark.parametrize(("total", "limit", "chunk"), [(256, 18, 16), (4, 100, 4), (7, 3, 3), (97, 10, 10), (6, 1, 1)])
def test_chunks_are_even(total: int, limit: int, chunk: int) -> None:
    assert choose_even_chunk(total, limit) == chunk


def test_frames_that_fill_up_a_clip_change_nothing() -> None:
    torch.manual_seed(0)
    model = SlotContrast(TINY, 32, 16).eval()
    features = torch.randn(1, 4, 16, 32)
    with torch.no_grad():
        short = model(features[:, :3])
        real = torch.tensor([[True, True, True, False]])
        filled = model(features, is_real=real)
        torch.testing.assert_close(short["error"], filled["error"])
        torch.testing.assert_close(short["masks"], filled["masks"][:, :3])
        torch.testing.assert_close(slot_contrast(short["slots"]), slot_contrast(filled["slots"], is_real=real))


def test_slots_stay_fp32_between_frames_and_the_cell_equals_torchs() -> None:
    torch.manual_seed(0)
    cell = torch.nn.GRUCell(8, 8)
    update, state = torch.randn(2, 3, 8), torch.randn(2, 3, 8)
    expected = cell(update.flatten(0, 1), state.flatten(0, 1)).unflatten(0, (2, 3))
    torch.testing.assert_close(update_recurrently(cell, update, state), expected)
    model = SlotContrast(TINY, 32, 16)
    with simulate("bf16"):
        found = model(torch.randn(2, 2, 16, 32))
    assert {name: value.dtype for name, value in found.items()} == dict.fromkeys(found, torch.float32)


def test_a_slot_that_wins_nothing_makes_no_nan() -> None:
    torch.manual_seed(0)
    model = SlotContrast(TINY, 32, 16)
    with torch.no_grad():
        model.processor.corrector.to_q.weight.mul_(1e4)
    with simulate("fp16"):
        found = model(torch.randn(2, 2, 16, 32))
        found["error"].backward()
    assert found["slots"].isfinite().all()


def test_contrast_is_cross_entropy_against_the_identity() -> None:
    torch.manual_seed(0)
    slots = F.normalize(torch.randn(3, 4, 5, 6), dim=-1)
    logits = compute_cosines(slots, slots) / 0.1
    eye = torch.eye(15).expand(3, 15, 15)
    expected = F.cross_entropy(logits, eye)
    torch.testing.assert_close(slot_contrast(slots), expected)
