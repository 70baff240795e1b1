"""Draws, samplers, scores and formats of the diffusion family, each alone."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from diffusion_tiny import pictures, settings, text_folder, vae_folder
from halfstep.errors import ConfigError, ModelError
from halfstep_train.data.loader import Key
from halfstep_train.run.memory.traceable_step import build_traceable_step
from halfstep_train.workloads.base.frozen_vae import (
    CachedLatents,
    LatentCache,
    choose_vae_format,
    measure_round_trips,
    open_or_write_latents,
)
from halfstep_train.workloads.base.sheets import arrange_grid
from halfstep_train.workloads.diffusion.build import check_steps, draw_path, make_scheduler, run_sampler
from halfstep_train.workloads.diffusion.data import make_square_samples, open_diffusion_data, scale_images, to_bytes
from halfstep_train.workloads.diffusion.diffusers_nets import CODEC, open_net
from halfstep_train.workloads.diffusion.evaluate import measure_distances, open_features, set_sampling
from halfstep_train.workloads.diffusion.networks import ClassConditions, open_text, pick_images
from halfstep_train.workloads.diffusion.noise_schedule import (
    NUM_BUCKETS,
    NoiseDraws,
    compute_alpha_bar,
    list_bucket_names,
    list_bucket_starts,
)
from halfstep_train.workloads.diffusion.scores import DenoisingMetrics, ReconstructionMetrics, denoising_loss
from halfstep_train.workloads.radio.build import add_noise, ddm_loss, list_times, recover_x0, sample_latents

CPU = torch.device("cpu")
SHAPE = (3, 4, 4)

# --- draws ---


def test_draws_of_a_batch_are_those_of_its_pieces() -> None:
    config = settings("diffusion", "x", noise__offset=0.1).config
    noising = NoiseDraws(config, SHAPE)  # type: ignore[arg-type]
    whole = noising.draw(6, key=Key.for_training(0, 5, place=0), device=CPU, index=None)
    part = noising.draw(2, key=Key.for_training(0, 5, place=4), device=CPU, index=None)
    assert set(whole) == {"timestep", "noise", "signal", "sigma", "loss_weight"}
    assert all(torch.equal(whole[name][4:], part[name]) for name in whole)
    other = noising.draw(6, key=Key.for_training(0, 6, place=0), device=CPU, index=None)
    assert not torch.equal(whole["noise"], other["noise"])


@pytest.mark.parametrize("num_steps", [4, 10, 100, 1000])
def test_validation_sees_every_bucket_of_timesteps_with_noise_fixed_by_sample(num_steps: int) -> None:
    config = settings("diffusion", "x", noise__steps=num_steps, noise__beta_end=0.02).config
    noising = NoiseDraws(config, SHAPE)  # type: ignore[arg-type]
    index = torch.arange(40)
    drawn = noising.draw(40, key=Key.for_validation(), device=CPU, index=index)
    assert torch.equal(drawn["timestep"] * NUM_BUCKETS // num_steps, index % NUM_BUCKETS)
    assert torch.equal(
        drawn["timestep"], noising.draw(40, key=Key.for_validation(), device=CPU, index=index)["timestep"]
    )
    assert list_bucket_starts(num_steps)[-1] == num_steps
    assert len(set(list_bucket_names(num_steps))) == NUM_BUCKETS


def test_classes_and_captions_are_dropped_by_the_key(tmp_path: Path) -> None:
    classes = ClassConditions(["cat", "dog"])
    label = torch.zeros(1000, dtype=torch.int64)
    dropped = classes.drop({"label": label}, key=Key.for_training(0, 1), share=0.3)["label"]
    assert 0.2 < float((dropped == 2).float().mean()) < 0.4
    assert torch.equal(classes.make_empty(2, CPU)["label"], torch.tensor([2, 2]))
    text = open_text(str(text_folder(tmp_path / "text")))
    tokens = text.tokenize(["a red disc", "a blue cross"])
    told = text.drop({"tokens": tokens}, key=Key.for_training(0, 1), share=1.0)["tokens"]
    assert torch.equal(told, text.make_empty(2, CPU)["tokens"])
    states = text.make_keywords({"tokens": tokens})["encoder_hidden_states"]
    assert states.shape == (2, text.length, text.text_dim)
    assert not states.requires_grad
    with pytest.raises(ModelError, match=r"text_encoder/ in it"):
        open_text(str(tmp_path))


# --- samplers ---


class Oracle:
    """Knows the image: predicts the noise that is left in a state."""

    def __init__(self, image: Tensor, alpha_bar: Tensor, target: str) -> None:
        self.image, self.alpha_bar, self.target = image, alpha_bar, target

    def __call__(self, state: Tensor, timestep: Tensor) -> Tensor:
        alpha = self.alpha_bar[int(timestep)]
        eps = (state - alpha.sqrt() * self.image) / (1 - alpha).sqrt()
        found = {"eps": eps, "sample": self.image, "v": alpha.sqrt() * eps - (1 - alpha).sqrt() * self.image}
        return found[self.target]


@pytest.mark.parametrize("target", ["eps", "v", "sample"])
@pytest.mark.parametrize("sampler", ["ddim", "dpm"])
@pytest.mark.parametrize("name", ["linear", "cosine"])
def test_samplers_find_the_image_of_a_model_that_knows_it(sampler: str, target: str, name: str) -> None:
    config: Any = settings("diffusion", "x", noise__schedule=name, noise__beta_end=0.1, model__target=target).config
    image = torch.rand(2, 3, 4, 4, generator=torch.Generator().manual_seed(0)) * 2 - 1
    scheduler = make_scheduler(set_sampling(config, {"sampler": sampler}), clips=True)
    start = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(1))
    found, path = run_sampler(
        Oracle(image, compute_alpha_bar(config.noise), target), scheduler, start, steps=10, kept=4
    )
    torch.testing.assert_close(found, image, rtol=0, atol=1e-3)
    assert torch.equal(path[0], start)
    errors = [float((state - image).square().mean()) for state in (*path, found)]
    assert errors == sorted(errors, reverse=True)


def test_an_unknown_sampler_and_more_steps_than_timesteps_are_refused() -> None:
    config: Any = settings("diffusion", "x").config
    with pytest.raises(ConfigError, match="'euler'") as refused:
        set_sampling(config, {"sampler": "euler"})
    assert refused.value.fix == "ddim or dpm"
    with pytest.raises(ConfigError, match="101 sampling steps"):
        check_steps(101, config)


# --- scores ---


def test_scores_equal_their_definition_for_any_batches() -> None:
    generator = torch.Generator().manual_seed(0)
    prediction, target = torch.randn(2, 10, 3, 4, 4, generator=generator).unbind()
    timestep = torch.arange(10) * 2
    weight = torch.rand(10, generator=generator)
    metrics = DenoisingMetrics(20)
    for rows in (slice(0, 3), slice(3, 10)):
        metrics.update({"prediction": prediction[rows], "target": target[rows]}, {"timestep": timestep[rows]})
    errors = (prediction - target).square().mean((1, 2, 3))
    found = metrics.compute()
    assert found["mse"] == pytest.approx(float(errors.mean()))
    assert found["mse/0-4"] == pytest.approx(float(errors[:3].mean()))
    assert found["mse/15-19"] == pytest.approx(float(errors[8:].mean()))
    again = DenoisingMetrics(20)
    again.load_state_dict(metrics.state_dict())
    assert again.compute() == found
    loss, num = denoising_loss({"prediction": prediction, "target": target}, {"loss_weight": weight})
    assert (float(loss), num) == (pytest.approx(float((errors * weight).mean())), 10)


def test_reconstruction_scores_equal_their_definition() -> None:
    generator = torch.Generator().manual_seed(0)
    image, made = (torch.rand(2, 4, 3, 4, 4, generator=generator) * 2 - 1).unbind()
    outputs = {"image": made * 2, "latent": torch.randn(4, 2, 2, 2, generator=generator), "kl": torch.arange(4.0)}
    metrics = ReconstructionMetrics()
    for rows in (slice(0, 1), slice(1, 4)):
        metrics.update({name: value[rows] for name, value in outputs.items()}, {"image": image[rows]})
    found, error = metrics.compute(), (made * 2).clamp(-1, 1).double() - image.double()
    assert found["l1"] == pytest.approx(float(error.abs().mean()))
    assert found["psnr"] == pytest.approx(float(10 * torch.log10(4 / error.square().mean())))
    assert found["kl"] == 1.5
    assert found["latent_std"] == pytest.approx(float(outputs["latent"].double().std(unbiased=False)))


class Means(nn.Module):
    """A stand-in for a feature network: means and deviations of channels."""

    def forward(self, image: Tensor) -> Tensor:
        pixels = image.float().flatten(2)
        return torch.cat([pixels.mean(2), pixels.std(2)], dim=1)


def test_fid_and_kid_are_torchmetrics_own_with_features_of_the_users(tmp_path: Path) -> None:
    file = tmp_path / "features.pt"
    torch.jit.script(Means()).save(str(file))
    features = open_features(file, CPU)
    real = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (12, 8, 8, 3), dtype=np.uint8))
    same = measure_distances(real, real, features, CPU, 5)
    other = measure_distances(real, real // 2, features, CPU, 5)
    assert same["fid"] == pytest.approx(0, abs=1e-3)
    assert other["fid"] > 100
    assert set(other) == {"fid", "kid", "kid_std"}
    # Fréchet distance of two Gaussians, by hand.
    a, b = (Means()(x.permute(0, 3, 1, 2)).double().numpy() for x in (real, real // 2))
    values = np.linalg.eigvals(np.cov(a.T) @ np.cov(b.T))
    expected = np.square(a.mean(0) - b.mean(0)).sum() + np.trace(np.cov(a.T) + np.cov(b.T))
    expected -= 2 * np.sqrt(values.astype(complex)).sum().real
    assert other["fid"] == pytest.approx(float(expected), rel=1e-3)
    with pytest.raises(ModelError, match="no such file"):
        open_features(tmp_path / "none.pt", CPU)
    (tmp_path / "text.pt").write_text("hello")
    with pytest.raises(ModelError, match="not a TorchScript"):
        open_features(tmp_path / "text.pt", CPU)


# --- the VAE's format ---


@pytest.fixture(scope="module")
def some_pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pictures(tmp_path_factory.mktemp("data") / "pictures", num=8)


def tried(folder: Path, data: Path, asked: str, *, simulated: bool = True) -> tuple[str, str]:
    config = settings("diffusion", data, precision__simulate=simulated).config
    samples = make_square_samples(open_diffusion_data(config.data).train, 8)  # type: ignore[arg-type]
    vae = open_net(folder, ["AutoencoderKL"]).requires_grad_(False).eval()
    return choose_vae_format(config, vae, CODEC.decode_means, lambda: pick_images(samples), asked)


def test_auto_takes_the_half_format_with_the_smaller_error_and_says_both(tmp_path: Path, some_pictures: Path) -> None:
    name, why = tried(vae_folder(tmp_path / "vae"), some_pictures, "auto")
    assert name == "fp16"
    assert re.search(r"fp16 [\d.]+%, bf16 [\d.]+%", why)


def test_a_vae_that_overflows_in_fp16_gets_another_format_or_is_refused(tmp_path: Path, some_pictures: Path) -> None:
    folder = vae_folder(tmp_path / "vae", scale=1e6)
    name, why = tried(folder, some_pictures, "auto")
    assert name in ("bf16", "fp32")
    assert "fp16 overflows" in why
    with pytest.raises(ConfigError, match=r"vae: fp16} overflows"):
        tried(folder, some_pictures, "fp16")
    assert tried(folder, some_pictures, "fp32") == ("fp32", "requested")


def test_trying_formats_leaves_onednn_as_it_was() -> None:
    """On a CPU that lacks bf16 torch switches it off at a large product; a resumed run, which tries nothing, would
    round otherwise."""
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(True)
    try:
        measure_round_trips(nn.Linear(64, 64), lambda vae, x: vae(x), torch.randn(64, 64), ("fp16", "bf16"))
        assert torch._C._get_mkldnn_enabled()
    finally:
        torch._C._set_mkldnn_enabled(before)


def test_on_a_cpu_auto_is_fp32(tmp_path: Path, some_pictures: Path) -> None:
    assert tried(vae_folder(tmp_path / "vae"), some_pictures, "auto", simulated=False)[0] == "fp32"


def test_frozen_networks_are_counted_without_their_weights_and_beside_tf32(tmp_path: Path, some_pictures: Path) -> None:
    folders = {"model__vae": vae_folder(tmp_path / "vae"), "model__text_encoder": text_folder(tmp_path / "text")}
    wish = {name: str(folder) for name, folder in folders.items()} | {"model__conditioning": "text"}
    smaller = {"model__channels": [8], "model__attention": [], "model__attention_head_dim": 2}
    config = settings("diffusion", some_pictures, **wish, **smaller, precision__modules={"vae": "fp32"}).config
    assert build_traceable_step(config, {"classes": []}).trace_phases("tf32", "none", 2, chains=False)


# --- pictures ---


def test_bytes_become_unit_images_and_back_and_mirror_images_come_by_the_key() -> None:
    pixels = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (50, 4, 4, 3), dtype=np.uint8))
    image = scale_images({"image": pixels}, key=(), flip=0.0)
    assert float(image.min()) >= -1
    assert float(image.max()) <= 1
    assert torch.equal(to_bytes(image), pixels)
    flipped = scale_images({"image": pixels}, key=Key.for_training(0, 0), flip=0.5)
    is_mirrored = (flipped == image.flip(-1)).flatten(1).all(1)
    assert 10 < int(is_mirrored.sum()) < 40
    assert torch.equal(flipped[~is_mirrored], image[~is_mirrored])


def test_grids_hold_every_picture() -> None:
    images = np.arange(5, dtype=np.uint8)[:, None, None, None].repeat(4, 1).repeat(6, 2).repeat(3, 3)
    sheet = arrange_grid(images)
    assert sheet.shape == (2 * (4 + 2) + 2, 3 * (6 + 2) + 2, 3)
    assert sorted(set(sheet.reshape(-1).tolist())) == [0, 1, 2, 3, 4, 255]
    assert draw_path([images[:2], images[2:4]]).shape == (2 * 6 + 2, 2 * 8 + 2, 3)


# --- decoupled diffusion: noising and sampling ---


def test_the_truth_has_no_loss_and_gives_back_the_latent() -> None:
    torch.manual_seed(0)
    x0, noise, time = torch.randn(4, 3, 4, 4), torch.randn(4, 3, 4, 4), torch.tensor([1e-4, 0.1, 0.7, 1.0])
    x_t = add_noise(x0, time, noise)
    torch.testing.assert_close(recover_x0(x_t, time, -x0, noise), x0, rtol=1e-5, atol=1e-5)
    assert torch.equal(ddm_loss(-x0, noise, x0, noise, time, weighted=True), torch.zeros(4))


def test_noising_is_fp32_under_half_autocast() -> None:
    """In bf16 a time below 1/256 would change nothing in 1 - t."""
    x0, noise, time = torch.randn(2, 1, 2, 2).bfloat16(), torch.randn(2, 1, 2, 2).bfloat16(), torch.full((2,), 1e-3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = add_noise(x0, time, noise)
    assert found.dtype == torch.float32
    assert torch.equal(found, add_noise(x0.float(), time, noise.float()))


def test_steps_are_calls_or_one_call_more() -> None:
    assert list_times(1) == (1.0, 1e-4)
    assert list_times(1, split_last=False) == (1.0,)
    assert list_times(5, split_last=False) == pytest.approx((1.0, 0.8, 0.6, 0.4, 0.2))
    assert len(list_times(5)) == 6


@pytest.mark.parametrize("steps", [1, 2, 5])
@pytest.mark.parametrize("split_last", [True, False])
def test_a_perfect_network_samples_the_truth_whatever_the_draws(steps: int, split_last: bool) -> None:
    """It knows x0, so it can tell the noise in x_t."""
    x0 = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    times = list_times(steps, split_last=split_last)

    def predict(x: Tensor, time: Tensor) -> tuple[Tensor, Tensor]:
        t = time.view(-1, 1, 1, 1)
        return -x0, (x - x0 * (1 - t)) / t.sqrt()

    draws = [torch.randn_like(x0) for _ in times]
    torch.testing.assert_close(sample_latents(predict, torch.randn_like(x0), draws, times), x0, rtol=1e-4, atol=1e-4)


# --- latents on disk ---

MOMENTS = torch.arange(6 * 2 * 4 * 2 * 2, dtype=torch.float32).view(6, 2, 4, 2, 2)


def open_or_write(path: Path, made_from: str, moments: torch.Tensor = MOMENTS) -> LatentCache:
    return open_or_write_latents(path, made_from, 6, lambda: iter(moments.split(4)))


def test_what_was_written_is_read_and_its_checksum_depends_on_the_numbers_only(tmp_path: Path) -> None:
    first, same, other = (
        open_or_write(tmp_path / name, made_from, moments)
        for name, moments, made_from in (("a", MOMENTS, "f"), ("b", MOMENTS, "g"), ("c", MOMENTS + 1, "f"))
    )
    assert torch.equal(first.moments, MOMENTS)
    assert first.checksum == same.checksum != other.checksum


def test_a_batch_is_its_samples_and_mirror_images_come_by_the_key() -> None:
    samples = CachedLatents(MOMENTS, flip=0.5, extra={"label": torch.arange(6)})
    indices = torch.tensor([4, 0, 3])
    batch = samples.make_batch(indices, seed=1, epoch=2)
    for row, index in enumerate(indices.tolist()):
        alone = samples.sample(index, key=(1, 2, index))
        assert torch.equal(batch["moments"][row], alone["moments"])
        assert int(alone["label"]) == index
    views = {int((s["moments"] == MOMENTS[0, 1]).all()) for e in range(8) for s in [samples.sample(0, key=(1, e, 0))]}
    assert views == {0, 1}
    plain = CachedLatents(MOMENTS)
    assert all(
        torch.equal(plain.sample(k, key=(1, e, k))["moments"], MOMENTS[k, 0]) for k in range(6) for e in range(4)
    )
