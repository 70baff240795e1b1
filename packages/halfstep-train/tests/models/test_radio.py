"""RadioDiff: its U-Net and layers, the Swin pyramid, and the autoencoder of its first stage."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor

from golden import assert_golden, assert_golden_gradients, golden, group
from halfstep_train.models.posterior import draw_latent, kl_divergence
from halfstep_train.workloads.radio.build import (
    add_noise,
    ddm_loss,
    list_times,
    recover_x0,
    sample_latents,
    scale_times,
)
from halfstep_train.workloads.radio.config import FirstStageConfig, PyramidConfig, RadioDiffModelConfig
from halfstep_train.workloads.radio.names import drop_loss_weights, rename_unet_weights
from halfstep_train.workloads.radio.swin import SwinPyramid, WindowAttention
from halfstep_train.workloads.radio.unet import (
    ChannelNorm,
    FourierFilter,
    RadioUNet,
    StandardisedConv2d,
    TimeEmbedding,
    WindowMeanAttention,
    apply_filter,
    linear_attention,
    make_sine_positions,
    mix_outputs,
)
from halfstep_train.workloads.radio.vae import RadioVAE


def golden_unet() -> tuple[RadioUNet, dict[str, Tensor], dict[str, object]]:
    tensors, facts = golden("radiodiff_tiny")
    sizes = facts["config"]["unet"]
    # The features are given.
    pyramid = PyramidConfig().model_copy(update={"depths": (0, 0, 0, 0)})
    assert sizes["window_sizes1"] == sizes["window_sizes2"]
    changes = {"width": sizes["dim"], "multipliers": sizes["dim_mults"], "windows": sizes["window_sizes1"]}
    settings = RadioDiffModelConfig().model_copy(update={**changes, "pyramid": pyramid, "dropout": 0.0})
    unet = RadioUNet(settings, channels=3, latent_size=(facts["config"]["latent"],) * 2)
    missing, unknown = unet.load_state_dict(rename_unet_weights(group(tensors, "state/")), strict=False)
    assert not unknown
    assert all(name.startswith("condition.") for name in missing)
    return unet, tensors, facts


def golden_vae() -> RadioVAE:
    tensors, facts = golden("radiodiff_vae_tiny")
    sizes = facts["config"]["ddconfig"]
    vae = RadioVAE(
        FirstStageConfig(width=sizes["ch"], multipliers=sizes["ch_mult"], num_blocks=sizes["num_res_blocks"])
    )
    vae.load_state_dict(group(tensors, "state/"))
    return vae.eval()


def features_of(tensors: dict[str, Tensor]) -> list[Tensor]:
    """What the public Swin-B would hand to the U-Net."""
    return [tensors[f"in/cond_features.{place}"].clone() for place in range(4)]


def test_golden_predictions_losses_gradients_and_statistics() -> None:
    unet, tensors, facts = golden_unet()
    vae = golden_vae()
    time = scale_times(tensors["noise/uniform"])
    with torch.no_grad():
        x0 = 0.3 * draw_latent(*vae.encode(tensors["in/image"]), tensors["noise/posterior"])
    assert_golden(x0, tensors["out/x0"], within=5e-5, name="x0")
    x0, noise = tensors["out/x0"], tensors["noise/eps"]
    x_t = add_noise(x0, time, noise)
    features = [feature.requires_grad_() for feature in features_of(tensors)]
    drift, predicted = unet.train().denoise(x_t, time, features)
    found = {
        "t": time,
        "x_t": x_t,
        "target_C": -x0,
        "C_pred": drift,
        "eps_pred": predicted,
        "x0_pred": recover_x0(x_t, time, drift, predicted),
    }
    for name, value in found.items():
        assert_golden(value, tensors[f"out/{name}"], name=name)

    def loss(weighted: bool) -> Tensor:
        return ddm_loss(drift, predicted, x0, noise, time, weighted=weighted).mean()

    for name, value in facts["scalars"].items():  # type: ignore[attr-defined]
        assert not name.endswith("l1") or abs(loss("weighted" in name).item() / value - 1) < 1e-5, name

    loss(True).backward()

    def rename(name: str) -> str:
        (own,) = rename_unet_weights({name: torch.empty(0)})  # none is dropped: each has a gradient
        return own

    assert_golden_gradients(unet, tensors, facts, rename=rename, within=5e-5)
    for place, feature in enumerate(features):
        assert feature.grad is not None
        assert_golden(feature.grad, tensors[f"grad_in/cond_features.{place}"], within=5e-5, name=f"features.{place}")
    buffers = dict(unet.named_buffers())
    for theirs, value in group(tensors, "after/").items():
        (name,) = rename_unet_weights({theirs: value})
        assert_golden(buffers[name], value, name=theirs)


def test_golden_predictions_in_evaluation() -> None:
    unet, tensors, _ = golden_unet()
    with torch.no_grad():
        for text in ("1", "0.5", "0.0001"):
            time = torch.full((2,), float(text))
            drift, noise = unet.eval().denoise(tensors["out/x_t"], time, features_of(tensors))
            assert_golden(drift, tensors[f"eval/C_pred_t{text}"], name=f"C at {text}")
            assert_golden(noise, tensors[f"eval/eps_pred_t{text}"], name=f"noise at {text}")


@pytest.mark.parametrize(
    ("case", "steps"), [("sample1", 1), ("sample5", 5), ("sample1_plain", 1), ("sample5_plain", 5)]
)
def test_golden_samples(case: str, steps: int) -> None:
    unet, tensors, facts = golden_unet()
    unet.eval()
    features, called = features_of(tensors), []

    def predict(x: Tensor, time: Tensor) -> tuple[Tensor, Tensor]:
        called.append(time)
        return unet.denoise(x, time, features)

    times = tensors[f"{case}/times"].tolist()
    own = list_times(5 if case.startswith("sample5") else 1, split_last=not case.endswith("plain"))
    # The original subtracts step after step in fp32, which leaves 1.00017e-4 of 1e-4.
    assert own == pytest.approx(times, abs=2e-7)
    latent = sample_latents(predict, tensors[f"{case}/start"], list(tensors[f"{case}/draws"]), times)
    assert len(called) == facts["unet_calls"][case]  # type: ignore[index]
    assert_golden(latent, tensors[f"{case}/latent"], name=case)
    with torch.no_grad():
        image = ((golden_vae().decode(latent / 0.3) + 1) / 2).clamp(0, 1)
    assert_golden(image, tensors[f"{case}/image"], within=5e-5, name=f"{case} decoded")


def test_golden_fourier_filter() -> None:
    tensors, _ = golden("radiodiff_blocks")
    for case in ("fft_square", "fft_wide"):
        x, weight = (tensors[f"{case}/{name}"].requires_grad_() for name in ("input", "weight"))
        found = apply_filter(x, weight)
        assert_golden(found, tensors[f"{case}/output"], name=case)
        (found * tensors[f"{case}/cotangent"]).sum().backward()
        assert x.grad is not None
        assert weight.grad is not None
        assert_golden(x.grad, tensors[f"{case}/grad_input"], name=case)
        assert_golden(weight.grad, tensors[f"{case}/grad_weight"], name=case)


@pytest.mark.parametrize("size", [(8, 8), (8, 16), (5, 7), (10, 6), (1, 4)])
def test_the_filter_is_torchs_fft_times_the_weight(size: tuple[int, int]) -> None:
    torch.manual_seed(0)
    layer = FourierFilter(3, size)
    assert layer.complex_weight.shape == (3, size[0], size[1] // 2 + 1, 2)
    x = torch.randn(2, 3, *size)
    product = torch.fft.rfft2(x, norm="ortho") * torch.view_as_complex(layer.complex_weight)
    expected = torch.fft.irfft2(product, s=size, norm="ortho")
    torch.testing.assert_close(layer(x), expected, rtol=1e-5, atol=1e-6)


def test_the_filter_computes_in_fp32_under_bf16_autocast() -> None:
    """The public block stops there: no FFT of bf16."""
    torch.manual_seed(0)
    layer, x = FourierFilter(2, (8, 8)), torch.randn(1, 2, 8, 8).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = layer(x)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, layer(x.float()).bfloat16())


def test_standardised_weights_and_channel_norm_are_one_function_for_all_types() -> None:
    """The public ones change their epsilon from 1e-5 to 1e-3 for anything but fp32."""
    conv, norm = StandardisedConv2d(2, 2, 3, padding=1), ChannelNorm(2)
    with torch.no_grad():
        conv.weight.mul_(0.01)  # a variance of 1e-5: the other epsilon would show
    x = (torch.randn(1, 2, 4, 4) * 0.01).bfloat16().float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        halved = conv(x.bfloat16())
    torch.testing.assert_close(halved.float(), conv(x), rtol=0.02, atol=0.02)
    torch.testing.assert_close(norm(x.bfloat16()).float(), norm(x), rtol=0.01, atol=0.01)


def test_linear_attention_in_half_precision_keeps_values_that_fp16_cannot_hold() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 1, 32, 4096) for _ in range(3))
    expected = linear_attention(q, k, v * 1e-3)
    found = linear_attention(q.half(), k.half(), (v * 1e-3).half())
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=0.01, atol=1e-3 * float(expected.abs().max()))


def test_positions_are_sines_of_rows_then_columns() -> None:
    found = make_sine_positions(2, 3, 8, torch.device("cpu")).view(2, 3, 8)
    assert float(found[1, 0, 0]) == pytest.approx(float(torch.tensor(2.0).sin()))
    assert float(found[0, 2, 5]) == pytest.approx(float(torch.tensor(3.0).cos()))
    assert float(found[0, 2, 6]) == pytest.approx(float(torch.tensor(3.0 / 100).sin()))


def test_windows_that_do_not_divide_the_map_are_padded() -> None:
    layer = WindowMeanAttention(8, (4, 4), 0.0)
    found = layer(torch.randn(1, 8, 7, 5), torch.randn(1, 8, 9, 6))
    assert found.shape == (1, 8, 9, 6)


def test_the_time_embedding_is_fp32_whatever_the_plan() -> None:
    torch.manual_seed(0)
    time, embedding = torch.tensor([1e-4, 0.3, 1.0]), TimeEmbedding(16, 16.0)
    seen: list[Tensor] = []
    embedding.mlp.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    embedding(time)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        embedding(time)
    assert torch.equal(seen[0], seen[1])


def test_predictions_at_the_ends_of_time_are_finite() -> None:
    x, h = torch.randn(2, 1, 2, 2), torch.randn(2, 1, 2, 2)
    drift, noise = mix_outputs(x, torch.tensor([1.0, 1e-4]), h, h)
    assert torch.equal(noise[0], x[0])
    torch.testing.assert_close(drift[1], x[1], rtol=1e-2, atol=1e-3)


@pytest.mark.slow
def test_the_whole_network_is_one_graph_for_the_compiler() -> None:
    pyramid = PyramidConfig(width=8, depths=(1,), num_heads=(1,), window=4)
    settings = RadioDiffModelConfig(pyramid=pyramid, width=8, multipliers=(1,), windows=((8, 8),))
    unet = RadioUNet(settings, channels=3, latent_size=(4, 4)).eval()
    x, time, image = torch.randn(1, 3, 4, 4), torch.tensor([0.5]), torch.randn(1, 3, 16, 16)
    traced = torch.compile(unet, backend="eager", fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(traced(x, time, image), unet(x, time, image))


# --- the Swin pyramid ---


def test_golden_features() -> None:
    tensors, facts = golden("radiodiff_blocks")
    sizes = facts["config"]["swin"]
    names = {"width": "embed_dim", "depths": "depths", "num_heads": "num_heads", "window": "window_size"}
    swin = SwinPyramid(PyramidConfig(**{ours: sizes[theirs] for ours, theirs in names.items()})).eval()
    state = {f"init_conv_mask.{name}": value for name, value in group(tensors, "swin/state/").items()}
    swin.load_state_dict({k.removeprefix("condition."): value for k, value in rename_unet_weights(state).items()})
    for place, found in enumerate(swin(tensors["swin/input"])):
        assert_golden(found, tensors[f"swin/features.{place}"], name=f"features.{place}")


def brute_force(attention: WindowAttention, x: torch.Tensor) -> torch.Tensor:
    """One window, one head and one query at a time, on the rolled map."""
    window, height, width = attention.window, -(-x.shape[1] // attention.window), -(-x.shape[2] // attention.window)
    padded = torch.zeros(len(x), height * window, width * window, x.shape[3])
    padded[:, : x.shape[1], : x.shape[2]] = x
    shift = [0 if window >= side else attention.shift for side in padded.shape[1:3]]
    dim = x.shape[3] // attention.num_heads
    qkv = attention.qkv(padded).detach()
    out = torch.zeros_like(padded)

    def window_of(row: int, column: int) -> tuple[int, ...]:
        """Where a place belongs after the roll, and whether it came round."""
        rolled = [(row - shift[0]) % padded.shape[1], (column - shift[1]) % padded.shape[2]]
        return (*(place // window for place in rolled), row < shift[0], column < shift[1])

    places = [(row, column) for row in range(padded.shape[1]) for column in range(padded.shape[2])]
    rolled_place = {p: tuple((p[a] - shift[a]) % padded.shape[a + 1] % window for a in (0, 1)) for p in places}
    table = attention.relative_position_bias_table.detach()
    for row, column in places:
        seen = [p for p in places if window_of(*p) == window_of(row, column)]
        for head in range(attention.num_heads):
            part = slice(head * dim, (head + 1) * dim)
            q = qkv[:, row, column, : x.shape[3]][:, part] * dim**-0.5
            ks = torch.stack([qkv[:, r, c, x.shape[3] : 2 * x.shape[3]][:, part] for r, c in seen], 1)
            vs = torch.stack([qkv[:, r, c, 2 * x.shape[3] :][:, part] for r, c in seen], 1)
            steps = [[rolled_place[row, column][a] - rolled_place[p][a] + window - 1 for a in (0, 1)] for p in seen]
            bias = torch.stack([table[down * (2 * window - 1) + right, head] for down, right in steps])
            weights = ((ks @ q[:, :, None])[..., 0] + bias).softmax(-1)
            out[:, row, column, part] = (weights[..., None] * vs).sum(1)
    return attention.proj(out).detach()[:, : x.shape[1], : x.shape[2]]


@pytest.mark.parametrize("size", [(6, 6), (5, 9), (3, 7), (2, 2)])
@pytest.mark.parametrize("shift", [0, 1])
def test_windows_are_those_of_a_loop_over_places(size: tuple[int, int], shift: int) -> None:
    torch.manual_seed(0)
    attention = WindowAttention(4, 2, window=3, shift=shift)
    torch.nn.init.normal_(attention.relative_position_bias_table)
    x = torch.randn(2, *size, 4)
    torch.testing.assert_close(attention(x).detach(), brute_force(attention, x), rtol=1e-5, atol=1e-5)


def test_any_size_gives_four_maps() -> None:
    swin = SwinPyramid(PyramidConfig(width=4, depths=(1, 2, 1, 1), num_heads=(1, 1, 2, 2))).eval()
    found = swin(torch.randn(1, 3, 68, 100))
    assert [tuple(feature.shape[1:]) for feature in found] == [(4, 17, 25), (8, 9, 13), (16, 5, 7), (32, 3, 4)]


def test_names_are_torchvisions() -> None:
    names = SwinPyramid(PyramidConfig(width=4, depths=(1, 1), num_heads=(1, 1))).state_dict()
    expected = {"features.0.0.weight", "features.1.0.attn.qkv.weight", "features.1.0.mlp.3.bias"}
    expected |= {"features.2.reduction.weight", "features.3.0.norm2.weight"}
    assert expected <= set(names)
    assert all(re.match(r"features\.\d+\.", name) for name in names)


def test_stochastic_depth_drops_whole_branches_of_samples_in_training_only() -> None:
    swin = SwinPyramid(PyramidConfig(width=4, depths=(2,), num_heads=(1,), stochastic_depth=0.5))
    drop = swin.features[1][1].stochastic_depth
    branch = torch.ones(64, 2, 2, 4)
    torch.manual_seed(0)
    kept = drop(branch).flatten(1)
    assert {float(row.min()) for row in kept} == {0.0, 2.0}
    assert torch.equal(kept.min(1).values, kept.max(1).values)
    assert torch.equal(drop.eval()(branch), branch)


# --- the autoencoder ---

VAE_TOLERANCE = 5e-5
"""The original's own drift with other kernels reaches 1e-5 here."""


def test_golden_moments_reconstruction_and_gradients() -> None:
    tensors, facts = golden("radiodiff_vae_tiny")
    sizes = facts["config"]["ddconfig"]
    vae = RadioVAE(
        FirstStageConfig(width=sizes["ch"], multipliers=sizes["ch_mult"], num_blocks=sizes["num_res_blocks"])
    )
    vae.load_state_dict(drop_loss_weights(group(tensors, "state/")))
    image, expected = tensors["in/image"], group(tensors, "out/")

    mean, log_variance = vae.encode(image)
    latents, kl = draw_latent(mean, log_variance, tensors["noise/posterior"]), kl_divergence(mean, log_variance)
    reconstruction = vae.decode(latents)
    found = {
        "moments": vae.quant_conv(vae.encoder(image)),
        "mean": mean,
        "logvar": log_variance,
        "z": latents,
        "recon": reconstruction,
        "recon_mode": vae.decode(mean),
        "kl": kl,
    }
    assert set(found) == set(expected)
    for name, value in found.items():
        assert_golden(value, expected[name], within=VAE_TOLERANCE, name=name)

    error = image - reconstruction
    nll = (error.abs() + error.square()).sum() / len(image)
    loss = nll + 1e-6 * kl.sum() / len(image)
    assert abs(loss.item() / facts["scalars"]["loss"] - 1) < VAE_TOLERANCE
    loss.backward()
    assert_golden_gradients(vae, tensors, facts, within=VAE_TOLERANCE, within_group=VAE_TOLERANCE)
    parameters = dict(vae.named_parameters())
    for name, norms in facts["gradients_not_stored"].items():
        grad = parameters[name].grad
        assert grad is not None
        assert abs(float(grad.norm()) / norms["l2_norm"] - 1) < VAE_TOLERANCE


def test_a_latent_is_a_quarter_of_the_map_and_odd_widths_have_their_groups() -> None:
    vae = RadioVAE(FirstStageConfig(width=12, multipliers=(1, 2, 4), num_blocks=1))
    maps = torch.randn(2, 1, 24, 16)
    found = vae(maps, torch.zeros(2, 3, 6, 4))
    assert found["image"].shape == maps.shape
    assert found["latent"].shape == (2, 3, 6, 4)
