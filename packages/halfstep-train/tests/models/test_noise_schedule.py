"""Noise schedules, noising, targets and min-SNR weights."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from diffusers import DDPMScheduler
from safetensors.torch import load_file

from halfstep.errors import ConfigError
from halfstep_train.workloads.diffusion.noise_schedule import NoiseSchedule, add_noise, make_loss_weights, make_target

GOLDEN = os.environ.get("HALFSTEP_GOLDEN")
THEIR_NAMES = {"linear": "linear", "scaled_linear": "scaled_linear", "cosine": "squaredcos_cap_v2"}
T = torch.tensor([0, 1, 5, 9, 10, 50, 500, 999])


def schedule_of(name: str, **more: object) -> NoiseSchedule:
    betas = {"beta_start": 0.00085, "beta_end": 0.012} if name == "scaled_linear" else {}
    return NoiseSchedule(name=name, **betas, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", THEIR_NAMES)
@pytest.mark.parametrize("zero_terminal", [False, True])
def test_tables_have_the_bits_of_the_schedulers_that_sample(name: str, zero_terminal: bool) -> None:
    ours = schedule_of(name, zero_terminal_snr=zero_terminal)
    theirs = DDPMScheduler(
        beta_schedule=THEIR_NAMES[name],
        beta_start=ours.beta_start,
        beta_end=ours.beta_end,
        rescale_betas_zero_snr=zero_terminal,
    )
    assert torch.equal(ours.alpha_bar, theirs.alphas_cumprod)


@pytest.mark.parametrize("name", ["linear", "scaled_linear"])
def test_golden_noise_targets_and_weights(name: str) -> None:
    if not GOLDEN:
        pytest.skip("golden data: set HALFSTEP_GOLDEN to the folder that holds them")
    golden = load_file(str(Path(GOLDEN) / "diffusers_tiny.safetensors"))
    gamma = json.loads((Path(GOLDEN) / "diffusers_tiny.json").read_text())["config"]["gamma"]
    x0, eps, schedule = golden["in/x0"], golden["in/eps"], schedule_of(name)
    signal, sigma = (table[golden["in/t"]] for table in schedule.compute_coefficients())
    found = {
        "x_t": add_noise(x0, eps, signal, sigma),
        "v": make_target("v", x0, eps, signal, sigma),
        "snr": schedule.snr[golden["in/t"]],
        "min_snr_eps": make_loss_weights(schedule, "eps", gamma)[golden["in/t"]],
        "min_snr_v": make_loss_weights(schedule, "v", gamma)[golden["in/t"]],
    }
    for key, value in found.items():
        expected = golden[f"{name}/{key}"]
        torch.testing.assert_close(value, expected, rtol=0, atol=1e-5 * float(expected.abs().max()), msg=key)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["linear", "scaled_linear", "cosine"])
def test_half_latents_get_all_their_noise_at_the_first_ten_timesteps(name: str, dtype: torch.dtype) -> None:
    schedule, t = schedule_of(name), torch.arange(10)
    signal, sigma = (table[t] for table in schedule.compute_coefficients())
    x0 = torch.randn(10, 4, 8, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    noise = torch.randn(10, 4, 8, 8, generator=torch.Generator().manual_seed(1))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = add_noise(x0, noise, signal, sigma)
        velocity = make_target("v", x0, noise, signal, sigma)
    left, added = schedule.alpha_bar[t].double().sqrt(), (1 - schedule.alpha_bar[t].double()).sqrt()
    shape = (-1, 1, 1, 1)
    exact = left.view(shape) * x0.double() + added.view(shape) * noise.double()
    assert found.dtype == velocity.dtype == torch.float32
    assert (added > 0).all()
    torch.testing.assert_close(found.double(), exact, rtol=1e-6, atol=1e-6)


def test_targets_say_the_same_in_three_ways() -> None:
    schedule, t = NoiseSchedule(), T
    signal, sigma = (table[t] for table in schedule.compute_coefficients())
    x0, noise = torch.randn(2, len(t), 3, 4, 4, generator=torch.Generator().manual_seed(0)).unbind()
    x_t = add_noise(x0, noise, signal, sigma)
    a, b = (c.view(-1, 1, 1, 1) for c in (signal, sigma))
    velocity = make_target("v", x0, noise, signal, sigma)
    torch.testing.assert_close(a * x_t - b * velocity, make_target("sample", x0, noise, signal, sigma))
    torch.testing.assert_close(b * x_t + a * velocity, make_target("eps", x0, noise, signal, sigma))


@pytest.mark.parametrize("target", ["eps", "v", "sample"])
def test_min_snr_weighs_the_image_error_of_every_target_by_the_smaller_of_snr_and_gamma(target: str) -> None:
    """An error of eps is the image's times SNR, of v the image's times SNR + 1."""
    schedule, gamma = NoiseSchedule(), 5.0
    to_image = {"eps": schedule.snr, "v": schedule.snr + 1, "sample": 1.0}[target]
    weights = make_loss_weights(schedule, target, gamma)  # type: ignore[arg-type]
    torch.testing.assert_close(weights * to_image, schedule.snr.clamp(max=gamma), rtol=1e-5, atol=0)
    assert torch.equal(make_loss_weights(schedule, target, None), torch.ones(1000))  # type: ignore[arg-type]


def test_gamma_zero_and_eps_without_terminal_signal_are_refused() -> None:
    with pytest.raises(ConfigError, match="gamma=0"):
        make_loss_weights(NoiseSchedule(), "v", 0.0)
    with pytest.raises(ConfigError, match=r"model\.target=v"):
        make_loss_weights(NoiseSchedule(zero_terminal_snr=True), "eps", 5.0)
    assert torch.isfinite(make_loss_weights(NoiseSchedule(zero_terminal_snr=True), "v", 5.0)).all()
