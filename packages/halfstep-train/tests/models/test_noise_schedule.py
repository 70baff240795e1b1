"""Noise schedules, noising, targets and min-SNR weights."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from golden import assert_golden, golden
from halfstep.errors import ConfigError
from halfstep_train.workloads import load
from halfstep_train.workloads.diffusion.config import NoiseConfig
from halfstep_train.workloads.diffusion.noise_schedule import (
    add_noise,
    compute_alpha_bar,
    compute_snr,
    make_loss_weights,
    make_target,
)
from halfstep_train.workloads.slots.dvae import hash_bits, make_gumbel_noise

T = torch.tensor([0, 1, 5, 9, 10, 50, 500, 999])


def alpha_bar_of(name: str, **more: Any) -> Tensor:
    betas = {"beta_start": 0.00085, "beta_end": 0.012} if name == "scaled_linear" else {}
    return compute_alpha_bar(NoiseConfig(schedule=name, **betas, **more))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["linear", "scaled_linear"])
def test_golden_noise_targets_and_weights(name: str) -> None:
    tensors, facts = golden("diffusers_tiny")
    gamma, x0, eps = facts["config"]["gamma"], tensors["in/x0"], tensors["in/eps"]
    alpha_bar = alpha_bar_of(name)[tensors["in/t"]]
    signal, sigma = alpha_bar.sqrt(), (1 - alpha_bar).sqrt()
    found = {
        "x_t": add_noise(x0, eps, signal, sigma),
        "v": make_target("v", x0, eps, signal, sigma),
        "snr": compute_snr(alpha_bar),
        "min_snr_eps": make_loss_weights(alpha_bar, "eps", gamma),
        "min_snr_v": make_loss_weights(alpha_bar, "v", gamma),
    }
    for key, value in found.items():
        assert_golden(value, tensors[f"{name}/{key}"], name=key)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["linear", "scaled_linear", "cosine"])
def test_half_latents_get_all_their_noise_at_the_first_ten_timesteps(name: str, dtype: torch.dtype) -> None:
    alpha_bar = alpha_bar_of(name)[:10]
    signal, sigma = alpha_bar.sqrt(), (1 - alpha_bar).sqrt()
    x0 = torch.randn(10, 4, 8, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    noise = torch.randn(10, 4, 8, 8, generator=torch.Generator().manual_seed(1))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = add_noise(x0, noise, signal, sigma)
        velocity = make_target("v", x0, noise, signal, sigma)
    left, added = alpha_bar.double().sqrt(), (1 - alpha_bar.double()).sqrt()
    shape = (-1, 1, 1, 1)
    exact = left.view(shape) * x0.double() + added.view(shape) * noise.double()
    assert found.dtype == velocity.dtype == torch.float32
    assert (added > 0).all()
    torch.testing.assert_close(found.double(), exact, rtol=1e-6, atol=1e-6)


def test_targets_say_the_same_in_three_ways() -> None:
    alpha_bar = alpha_bar_of("linear")[T]
    signal, sigma = alpha_bar.sqrt(), (1 - alpha_bar).sqrt()
    x0, noise = torch.randn(2, len(T), 3, 4, 4, generator=torch.Generator().manual_seed(0)).unbind()
    x_t = add_noise(x0, noise, signal, sigma)
    a, b = (c.view(-1, 1, 1, 1) for c in (signal, sigma))
    velocity = make_target("v", x0, noise, signal, sigma)
    torch.testing.assert_close(a * x_t - b * velocity, make_target("sample", x0, noise, signal, sigma))
    torch.testing.assert_close(b * x_t + a * velocity, make_target("eps", x0, noise, signal, sigma))


@pytest.mark.parametrize("target", ["eps", "v", "sample"])
def test_min_snr_weighs_the_image_error_of_every_target_by_the_smaller_of_snr_and_gamma(target: str) -> None:
    """An error of eps is the image's times SNR, of v the image's times SNR + 1."""
    alpha_bar, gamma = alpha_bar_of("linear"), 5.0
    snr = compute_snr(alpha_bar)
    to_image = {"eps": snr, "v": snr + 1, "sample": 1.0}[target]
    weights = make_loss_weights(alpha_bar, target, gamma)  # type: ignore[arg-type]
    torch.testing.assert_close(weights * to_image, snr.clamp(max=gamma), rtol=1e-5, atol=0)
    assert torch.equal(make_loss_weights(alpha_bar, target, None), torch.ones(1000))  # type: ignore[arg-type]


def test_gamma_zero_and_eps_without_terminal_signal_are_refused() -> None:
    with pytest.raises(ConfigError, match="model.min_snr_gamma"):
        load("diffusion", overrides=["model.min_snr_gamma=0"])
    with pytest.raises(ConfigError, match=r"model\.target=v"):
        load("diffusion", overrides=["noise.zero_terminal_snr=true"])
    alpha_bar = alpha_bar_of("linear", zero_terminal_snr=True)
    assert torch.isfinite(make_loss_weights(alpha_bar, "v", 5.0)).all()


# --- Gumbel noise from keys ---

KEYS = torch.tensor([[5, 7], [5, 8], [6, 7], [2**31 - 1, 0]])


def test_a_frame_gets_the_same_noise_in_a_batch_of_any_size_and_with_any_vocabulary() -> None:
    whole = make_gumbel_noise(KEYS, 6, 40)
    assert torch.equal(make_gumbel_noise(KEYS[2:3], 6, 40)[0], whole[2])
    assert torch.equal(make_gumbel_noise(KEYS, 4, 30), whole[:, :4, :30])


def word_by_hand(first: int, second: int, position: int, word: int) -> int:
    """The same hash in Python's own integers."""

    def mixed(x: int) -> int:
        x = ((x ^ x >> 16) * 0x7FEB352D) % 2**32
        x = ((x ^ x >> 15) * 0x846CA68B) % 2**32
        return x ^ x >> 16

    row = mixed(mixed((position + first) % 2**32) ^ second)
    other = mixed(mixed((position + second) % 2**32) ^ first)
    return mixed(mixed((word + row) % 2**32) ^ other)


def test_bits_are_those_of_unsigned_arithmetic() -> None:
    """Products wrap around and shifts fill with zeros, on a type that has a sign."""
    found = hash_bits(KEYS, 3, 50)
    by_hand = [[[word_by_hand(*pair, p, w) for w in range(50)] for p in range(3)] for pair in KEYS.tolist()]
    assert torch.equal(found.long() % 2**32, torch.tensor(by_hand))


def test_it_has_the_mean_the_spread_and_the_tail_of_gumbels_distribution() -> None:
    noise = make_gumbel_noise(torch.arange(64).view(32, 2), 64, 1024).double()
    error = math.pi / math.sqrt(6 * noise.numel())
    assert abs(noise.mean() - 0.5772156649) < 5 * error
    assert abs(noise.var() / (math.pi**2 / 6) - 1) < 0.01
    assert noise.isfinite().all()
    share_above_ten = (noise > 10).double().mean()
    assert abs(share_above_ten / -math.expm1(-math.exp(-10)) - 1) < 0.35  # about 95 of two million
    assert -3 < noise.min() < noise.max() < 23
