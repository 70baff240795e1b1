"""diffusers' networks as halfstep builds and opens them, and the parts around the VAE: its latent, its critics."""

from __future__ import annotations

import json
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKL
from safetensors.torch import load_file, save_file

from diffusion_tiny import text_folder, vae_folder
from halfstep.errors import ConfigError, ModelError
from halfstep_train.models.layers import LEVELS_HALVE, divide_side
from halfstep_train.models.patch_gan import VggDistance
from halfstep_train.models.posterior import draw_latent, kl_divergence, split_moments
from halfstep_train.workloads.diffusion.config import DiffusionModelConfig
from halfstep_train.workloads.diffusion.diffusers_nets import (
    CODEC,
    VAE,
    build_net,
    decode_scaled,
    dump_config,
    find_net_folder,
    import_diffusers_class,
    make_unet_config,
    make_vae_config,
    open_net,
)
from halfstep_train.workloads.diffusion.networks import open_text
from tiny_training import assert_same_bits

SMALL = DiffusionModelConfig(channels=(8, 16), layers=1)
SHAPE = (3, 8, 8)


def test_a_network_is_built_again_from_what_a_run_stores_of_it() -> None:
    net = build_net(make_unet_config(SMALL.model_copy(update={"attention": (1,)}), SHAPE, num_classes=4))
    again = build_net(json.loads(json.dumps(dump_config(net))))
    again.load_state_dict(net.state_dict())
    x, t, label = torch.randn(2, 3, 8, 8), torch.tensor([0, 5]), torch.tensor([1, 3])
    assert torch.equal(net(x, t, class_labels=label)[0], again(x, t, class_labels=label)[0])


def test_a_level_that_is_not_there_cannot_have_attention() -> None:
    with pytest.raises(ConfigError, match="level 2"):
        make_unet_config(SMALL.model_copy(update={"attention": (2,)}), SHAPE)


@pytest.mark.parametrize(("side", "near"), [(13, 16), (20, 16), (4, 8)])
def test_images_that_cannot_be_halved_are_refused_with_a_side_that_can(side: int, near: int) -> None:
    with pytest.raises(ConfigError, match=f"{side} pixels: the side must be a multiple of 8") as refusal:
        divide_side(side, 8, LEVELS_HALVE)
    assert refusal.value.fix == f"data.image_size={near}"
    assert divide_side(16, 8, LEVELS_HALVE) == 2


def test_folders_of_diffusers_are_opened_and_others_are_named(tmp_path: Path) -> None:
    folder = vae_folder(tmp_path / "pipeline" / "vae")
    assert find_net_folder(str(folder), "vae", "model.vae") == find_net_folder(
        str(tmp_path / "pipeline"), "vae", "model.vae"
    )
    opened = open_net(folder, ["AutoencoderKL"])
    assert isinstance(opened, AutoencoderKL)
    latent = vae_folder(tmp_path / "latent" / "vqvae")  # the other name of a pipeline's VAE
    assert find_net_folder(str(tmp_path / "latent"), "vae", "model.vae") == latent
    with pytest.raises(ModelError, match="AutoencoderKL"):
        open_net(folder, ["UNet2DModel"])
    with pytest.raises(ModelError, match="halfstep downloads nothing"):
        find_net_folder("stabilityai/some-model", "unet", "model.weights")
    with torch.no_grad():
        opened.decoder.conv_out.bias[0] = torch.nan
    opened.save_pretrained(tmp_path / "broken")
    with pytest.raises(ModelError, match=r"not finite: decoder\.conv_out\.bias"):
        open_net(tmp_path / "broken", ["AutoencoderKL"])
    (tmp_path / "broken" / "diffusion_pytorch_model.safetensors").write_bytes(b"no")
    with pytest.raises(ModelError, match="cannot open"):
        open_net(tmp_path / "broken", ["AutoencoderKL"])


@pytest.mark.parametrize(
    "how", [{"variant": "fp16"}, {"safe_serialization": False}, {"variant": "fp16", "max_shard_size": "2KB"}, {}]
)
def test_a_folder_of_halves_shards_or_pickled_tensors_is_opened(tmp_path: Path, how: dict[str, Any]) -> None:
    vae = build_net(make_vae_config(channels=(8, 8), layers=1, latent_channels=2, image_size=8)).half()
    vae.save_pretrained(tmp_path, **how)
    opened = open_net(tmp_path, ["AutoencoderKL"])
    assert_same_bits(opened.state_dict(), {name: value.float() for name, value in vae.state_dict().items()})


def test_a_vae_of_gray_images_is_refused(tmp_path: Path) -> None:
    gray = make_vae_config(channels=(8,), layers=1, latent_channels=2, image_size=8) | {
        "in_channels": 1,
        "out_channels": 1,
    }
    build_net(gray).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="in_channels=1, out_channels=1"):
        open_net(tmp_path, ["AutoencoderKL"])


def test_weights_that_lack_a_tensor_are_not_filled_by_chance(tmp_path: Path) -> None:
    text = text_folder(tmp_path / "text")
    for file, opened in (
        (vae_folder(tmp_path / "vae") / "diffusion_pytorch_model.safetensors", lambda place: open_net(place, [VAE])),
        (text / "text_encoder" / "model.safetensors", lambda place: open_text(str(text))),
    ):
        weights = load_file(file)
        opened(file.parent)
        weights.pop(lost := sorted(weights)[0])
        save_file(weights, file, metadata={"format": "pt"})
        with pytest.raises(ModelError, match=f"lack 1 tensor, such as .*{lost}"):
            opened(file.parent)


def test_what_is_only_counted_reads_no_weights(tmp_path: Path) -> None:
    folder = vae_folder(tmp_path)
    (folder / "diffusion_pytorch_model.safetensors").unlink()
    with torch.device("meta"):
        assert all(weight.is_meta for weight in open_net(folder, ["AutoencoderKL"]).parameters())


def test_whole_weights_come_before_halves_though_pickled(tmp_path: Path) -> None:
    vae = build_net(make_vae_config(channels=(8, 8), layers=1, latent_channels=2, image_size=8))
    vae.save_pretrained(tmp_path, safe_serialization=False)
    whole = {name: value.clone() for name, value in vae.state_dict().items()}
    vae.half().save_pretrained(tmp_path, variant="fp16")
    (tmp_path / "optimizer.bin").touch()
    assert_same_bits(open_net(tmp_path, ["AutoencoderKL"]).state_dict(), whole)


def test_latents_are_scaled_and_shifted_back_before_they_are_decoded(tmp_path: Path) -> None:
    vae = open_net(vae_folder(tmp_path / "vae"), ["AutoencoderKL"])
    vae.register_to_config(scaling_factor=0.5, shift_factor=0.25)
    with torch.no_grad():
        mean, _ = CODEC.encode(vae, torch.randn(1, 3, 8, 8))
        torch.testing.assert_close(decode_scaled(vae, (mean - 0.25) * 0.5), vae.decode(mean).sample)


def test_the_posterior_stays_finite_where_a_half_format_would_not() -> None:
    moments = torch.tensor([3.0, 1e4]).view(1, 2, 1, 1).half()
    mean, logvar = split_moments(moments)
    assert mean.dtype == logvar.dtype == torch.float32
    assert float(logvar) == 20
    assert bool(kl_divergence(mean, logvar).isfinite().all())
    assert bool(draw_latent(mean, logvar, torch.ones(1, 1, 1, 1)).isfinite().all())
    # A latent without any variance is a number, not NaN.
    mean, logvar = split_moments(torch.tensor([3.0, -torch.inf]).view(1, 2, 1, 1))
    assert float(draw_latent(mean, logvar, torch.ones(1, 1, 1, 1))) == pytest.approx(3, abs=1e-6)
    assert float(kl_divergence(mean, logvar)) == pytest.approx(0.5 * (9 - 1 + 30))


def test_kl_is_zero_for_a_standard_normal_latent_and_equals_torchs() -> None:
    mean, logvar = torch.randn(2, 3, 2, 4, 4, generator=torch.Generator().manual_seed(0)).unbind()
    normal = torch.distributions.Normal
    expected = torch.distributions.kl_divergence(normal(mean, (logvar / 2).exp()), normal(0.0, 1.0)).sum((1, 2, 3))
    torch.testing.assert_close(kl_divergence(mean, logvar), expected)
    assert float(kl_divergence(torch.zeros(1, 2), torch.zeros(1, 2))) == 0


def test_vgg_distance_is_zero_for_equal_images_and_takes_torchvisions_names() -> None:
    distance = VggDistance()
    weights = {**VggDistance().state_dict(), "classifier.0.weight": torch.zeros(2, 2)}
    assert {"features.0.weight", "features.28.bias"} <= set(weights)
    distance.load_(weights, "vgg16.pth")
    one, other = torch.rand(2, 2, 3, 16, 16).mul(2).sub(1).unbind()
    with torch.no_grad():
        assert float(distance(one, one).abs().max()) == 0
        found = distance(one, other)
    assert found.shape == (2,)
    assert bool((found > 0).all())
    assert found.dtype == torch.float32
    del weights["features.28.bias"]
    with pytest.raises(ModelError, match=r"features\.28\.bias"):
        distance.load_(weights, "vgg16.pth")


def test_without_diffusers_the_error_gives_a_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "diffusers", None)
    with pytest.raises(ModelError, match="diffusers cannot be imported") as caught:
        import_diffusers_class("UNet2DModel")
    assert caught.value.fix == "pip install 'diffusers>=0.32' 'transformers>=4.48' 'tokenizers>=0.21'"


def test_a_folder_with_python_objects_in_its_weights_is_refused_without_torchs_advice(tmp_path: Path) -> None:
    vae, text = vae_folder(tmp_path / "vae"), text_folder(tmp_path / "text")
    for folder, name in ((vae, "diffusion_pytorch_model.bin"), (text, "pytorch_model.bin")):
        for file in list(folder.rglob("*.safetensors")):
            torch.save({**load_file(file), "seed": Fraction(1, 3)}, file.with_name(name))
            file.unlink()
    for open_folder in (lambda: open_net(vae, [VAE]), lambda: open_text(str(text))):
        with pytest.raises(ModelError, match=r"it contains Python objects \(fractions.Fraction\)") as caught:
            open_folder()
        assert "weights_only" not in str(caught.value)
        assert "safetensors" in caught.value.fix
