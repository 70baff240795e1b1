"""Whole runs of the VAE, alone and against a discriminator."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKL
from torch import Tensor

from diffusion_tiny import pictures, settings
from halfstep.errors import ConfigError, ModelError
from halfstep_train.models.patch_gan import VggDistance
from halfstep_train.report.run_report import RunReport
from halfstep_train.run.checkpoint import load
from halfstep_train.run.train import train
from halfstep_train.use.evaluate import evaluate
from halfstep_train.workloads import load as load_settings
from halfstep_train.workloads.base import frozen_vae
from halfstep_train.workloads.diffusion import vae as autoencoder
from halfstep_train.workloads.diffusion.build import measure_scale
from tiny_training import assert_same_bits
from whole_runs import newest, resume, stored_lines

GAN: dict[str, Any] = {
    "model__gan_weight": 0.5,
    "model__gan_from_step": 1,
    "data__image_size": 32,
    "model__channels": [8],
}
EACH_STEP = {"train__checkpoint_every": 1, "train__checkpoints_total_limit": 0}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pictures(tmp_path_factory.mktemp("vae") / "pictures")


def last(run: Path) -> dict[str, Any]:
    return [line for line in stored_lines(run) if line["kind"] == "val"][-1]


def steps_of(run: Path) -> dict[int, dict[str, Tensor]]:
    return {int(path.name.split("-")[1]): load(path).model for path in (run / "checkpoints").glob("step-*")}


def test_a_vae_learns_and_fp16_learns_as_well(data: Path, tmp_path: Path) -> None:
    wish = {"train__epochs": 10, "train__validate_every": 10, "train__checkpoint_every": 10, "train__batch_size": 18,
            "optimizer__lr": 1e-2, "model__channels": [8]}  # fmt: skip
    exact = last(train(settings("vae", data, **wish), out=tmp_path / "fp32"))
    assert exact["l1"] < 0.3  # a black picture: 0.75
    half = {"precision__default": "fp16", "precision__simulate": True}
    found = last(train(settings("vae", data, **wish, **half), out=tmp_path / "fp16"))
    assert found["loss"] == pytest.approx(exact["loss"], rel=0.05)


def test_two_phases_go_on_to_the_bit(data: Path, tmp_path: Path) -> None:
    wish = {"schedule__name": "constant", "ema__enabled": True, **GAN}
    whole = train(settings("vae", data, **wish), out=tmp_path / "whole")
    part = train(settings("vae", data, train__max_steps=2, **wish), out=tmp_path / "part")
    resume(part, "train.max_steps=0")
    assert_same_bits(newest(whole).model, newest(part).model)
    assert_same_bits(newest(whole).ema, newest(part).ema)
    assert all(name.startswith("vae.") for name in newest(whole).ema)
    assert {"train_loss/vae", "train_loss/discriminator"} <= set(last(whole))


def test_both_phases_clip_before_they_step(data: Path, tmp_path: Path) -> None:
    wish = {"optimizer__name": "sgd", "optimizer__lr": 1.0, "optimizer__betas": None, "train__clip_norm": 1e-3, **GAN}
    run = train(settings("vae", data, train__max_steps=3, **wish, **EACH_STEP), out=tmp_path / "run")
    found = steps_of(run)
    for part in ("vae.", "discriminator."):
        moved = torch.stack([(found[3][n] - found[2][n]).norm() for n in found[3] if n.startswith(part)]).norm()
        # SGD's momentum of 0.9 adds up at most three clipped gradients.
        assert 0 < float(moved) <= 1e-3 * (1 + 0.9 + 0.81) * 1.001, part


@pytest.mark.slow
def test_an_exploding_discriminator_costs_its_own_steps_alone(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = frozen_vae.compute_discriminator_loss

    def exploding(outputs: Any, batch: Any) -> tuple[Tensor, float]:
        loss, num = original(outputs, batch)
        return loss * torch.where((batch["index"] == 3).any(), torch.inf, 1.0), num

    monkeypatch.setattr(frozen_vae, "compute_discriminator_loss", exploding)
    run = train(settings("vae", data, **{**GAN, "model__gan_from_step": 0}, **EACH_STEP), out=tmp_path / "run")
    found = steps_of(run)

    def still(name: str) -> int:
        return sum(torch.equal(found[k][name], found[k - 1][name]) for k in range(2, 7))

    assert still("discriminator.layers.0.weight") in (1, 2)  # its picture comes once in each of two epochs
    assert still("vae.encoder.conv_in.weight") == 0
    assert all(bool(tensor.isfinite().all()) for tensor in found[6].values())
    skipped = [line for line in stored_lines(run) if line.get("event") == "skipped"]
    assert {(line["phase"], line["reason"]) for line in skipped} == {("discriminator", "loss is inf")}


def test_a_discriminator_that_has_not_started_counts_for_nothing_even_if_it_overflows(data: Path) -> None:
    wish = {**GAN, "model__gan_from_step": 5}
    built = autoencoder.build(settings("vae", data, **wish).config)  # type: ignore[arg-type]
    samples = [built.train_samples.sample(k, key=(0, 0, k)) for k in range(2)]
    loaded = {name: torch.stack([one[name] for one in samples]) for name in samples[0]}
    batch = built.prepare_batch(loaded, key=(0, 0), training=True)

    def gradients() -> dict[str, Tensor]:
        built.model.zero_grad()
        loss, _ = built.phases[0].loss(built.forward(built.model.train(), batch), batch)  # type: ignore[misc]
        loss.backward()
        return {name: value.grad.clone() for name, value in built.model.vae.named_parameters()}

    before = gradients()
    with torch.no_grad():
        built.model.discriminator.layers[0].weight.mul_(torch.inf)
    assert_same_bits(gradients(), before)


def test_the_exported_vae_knows_the_scale_of_its_latents(data: Path, tmp_path: Path) -> None:
    run = train(settings("vae", data, train__max_steps=2), out=tmp_path / "run")
    vae = AutoencoderKL.from_pretrained(run / "model" / "vae", low_cpu_mem_usage=False)
    config = settings("vae", data).config
    scale = measure_scale(vae, config, vae.device)  # type: ignore[arg-type]
    assert vae.config.scaling_factor == pytest.approx(scale)
    assert 0.1 < scale < 10
    again = train(
        settings("vae", data, train__max_steps=1, model__weights=str(run / "model"), optimizer__lr=1e-12),
        out=tmp_path / "again",
    )
    torch.testing.assert_close(newest(again).model["vae.encoder.conv_in.weight"], vae.encoder.conv_in.weight)
    with torch.no_grad():
        for parameter in vae.parameters():
            parameter.zero_()
        vae.quant_conv.bias[vae.config.latent_channels :] = -100.0
    with pytest.raises(ModelError, match="standard deviation of 0") as refused:
        measure_scale(vae, config, vae.device)  # type: ignore[arg-type]
    assert "model.kl_weight" in refused.value.fix


def test_pictures_are_evaluated_with_their_reconstructions(data: Path, tmp_path: Path) -> None:
    run = train(settings("vae", data, train__max_steps=1), out=tmp_path / "run")
    found = evaluate(run, report=RunReport(run))
    assert found.metrics["psnr"] == pytest.approx(last(run)["psnr"], rel=1e-6)
    assert any(file.endswith("reconstructions.png") for file in found.files)


def test_the_perceptual_loss_is_vggs_and_needs_its_file(data: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="never downloaded"):
        settings("vae", data, model__perceptual_weight=1.0)
    torch.manual_seed(0)
    torch.save(VggDistance().state_dict(), tmp_path / "vgg.pth")
    wish = {"model__perceptual_weight": 0.5, "model__vgg_weights": str(tmp_path / "vgg.pth"), "data__image_size": 16}
    built = autoencoder.build(settings("vae", data, **wish).config)  # type: ignore[arg-type]
    assert set(built.frozen) == {"vgg"}
    image = torch.rand(1, 3, 16, 16) * 2 - 1
    outputs = {"image": (image * 0.5).requires_grad_(), "kl": torch.zeros(1)}
    loss, _ = built.compute_loss(outputs, {"image": image})
    plain = (outputs["image"] - image).abs().mean()
    vgg = built.frozen["vgg"].module
    torch.testing.assert_close(loss, plain + 0.5 * vgg(outputs["image"], image).mean())
    loss.backward()
    assert bool(outputs["image"].grad.isfinite().all())
    torch.save({"features.0.weight": torch.zeros(1)}, tmp_path / "other.pth")
    with pytest.raises(ModelError, match="no VGG16"):
        autoencoder.build(settings("vae", data, **{**wish, "model__vgg_weights": str(tmp_path / "other.pth")}).config)  # type: ignore[arg-type]


def test_images_too_small_for_the_discriminator_are_refused(data: Path) -> None:
    with pytest.raises(ConfigError, match="data.image_size=8 is too small for the discriminator"):
        autoencoder.build(settings("vae", data, **{**GAN, "data__image_size": 8}).config)  # type: ignore[arg-type]
    odd = {**GAN, "data__image_size": 36}  # it halves what is left without counting on 2**n
    autoencoder.build(settings("vae", data, **odd).config)  # type: ignore[arg-type]


def test_defaults_hold_beside_other_settings_of_their_section() -> None:
    config = settings("vae", "x").config
    assert not config.ema.enabled
    plain = load_settings("vae", overrides=["data.dir=x", "train.epochs=1", "data.flip=0", "ema.decay=0.9"]).config
    assert (plain.train.batch_size, plain.data.image_size, plain.ema.enabled) == (4, 256, False)
